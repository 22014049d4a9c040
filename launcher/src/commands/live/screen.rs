//! Draws the terminal view. It fits 80 columns and 24 rows.

use memtrace_analysis::printable;
use memtrace_analysis::report::{LiveDevice, share_text, size_text};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::text::{device_name, growth, main_memory, position, process_name, totals};
use super::view::{Sort, Table, View};

/// The colors of categories and owners, most bytes first. Others have the last one.
const COLORS: [Color; 8] = [
    Color::Blue,
    Color::Green,
    Color::Yellow,
    Color::Magenta,
    Color::Cyan,
    Color::Red,
    Color::LightBlue,
    Color::LightGreen,
];
/// The color of memory that PyTorch's allocator has reserved and not handed out.
const CACHED: Color = Color::DarkGray;
/// The rows of the legend of categories.
const LEGEND_ROWS: usize = 3;
/// The width of an entry of a legend, in columns.
const ENTRY: usize = 39;

/// Draws the view.
pub(super) fn draw(frame: &mut Frame<'_>, view: &View) {
    let area = frame.area();
    let mut lines = head(view, area.width.into());
    let rows = usize::from(area.height).saturating_sub(lines.len() + 1);
    lines.extend(table(view, rows));
    lines.truncate(usize::from(area.height).saturating_sub(1));
    frame.render_widget(Paragraph::new(lines), area);
    let last = Rect { y: area.bottom().saturating_sub(1), height: area.height.min(1), ..area };
    frame.render_widget(Paragraph::new(foot(view)), last);
    for cell in &mut frame.buffer_mut().content {
        if cell.symbol().contains(printable::is_unprintable) {
            cell.set_char('\u{fffd}');
        }
    }
}

fn bold(text: String) -> Span<'static> {
    Span::styled(text, Style::new().add_modifier(Modifier::BOLD))
}

/// A text from the recorded program as one line without control characters.
fn shown(text: &str) -> String {
    printable::line(text).into_owned()
}

/// The lines above the table.
fn head(view: &View, width: usize) -> Vec<Line<'static>> {
    let Some((index, count, folder, process)) = view.process() else {
        let problems = view.report.recordings.iter().flat_map(|recording| &recording.problems);
        let mut lines = vec![Line::from(bold("No process is being recorded".to_owned()))];
        lines.extend(problems.map(|problem| Line::from(shown(problem))));
        return lines;
    };
    let run = folder.rsplit('/').next().unwrap_or(folder);
    let mut lines = vec![
        Line::from(vec![
            bold(process_name(process)),
            Span::raw(format!("  process {} of {count}  {}", index + 1, shown(run))),
        ]),
        Line::from(position(process)),
    ];
    let host = view.report.recordings.iter().find(|one| one.folder == folder).and_then(|one| one.host.as_ref());
    lines.extend(host.map(|host| Line::from(main_memory(host))));
    let Some(device) = view.device() else { return lines };
    lines.push(Line::from(vec![bold(device_name(device)), Span::raw(format!("  {}", shown(&totals(device))))]));
    lines.extend(bars(device, width));
    let growing = device.growth.oom_in_ns.map_or(Style::new(), |_| Style::new().fg(Color::Red));
    lines.push(Line::from(Span::styled(growth(&device.growth), growing)));
    lines
}

/// The bars by category and by owner with their legends.
fn bars(device: &LiveDevice, width: usize) -> Vec<Line<'static>> {
    let mut categories: Vec<(String, u64)> =
        device.by_category.iter().map(|amount| (amount.category.plural().to_owned(), amount.bytes)).collect();
    categories.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let owners: Vec<(String, u64)> = device.by_owner.iter().map(|owner| (shown(&owner.owner), owner.bytes)).collect();
    let owned: u64 = owners.iter().map(|(_, bytes)| bytes).sum();
    let (allocated, reserved) = (device.totals.allocated_bytes, device.totals.reserved_bytes);
    let whole = device.total_bytes.unwrap_or(0).max(reserved).max(allocated).max(owned);
    let mut with_cached = colored(&categories);
    with_cached.push((CACHED, reserved.saturating_sub(allocated)));
    let mut lines = vec![bar(&with_cached, whole, width)];
    let mut entries = legend(&categories, allocated);
    entries.push(entry(CACHED, "reserved, unallocated", reserved.saturating_sub(allocated)));
    let columns = (width / ENTRY).max(1);
    let rows = entries.chunks(columns).take(LEGEND_ROWS).map(|row| Line::from(row.concat()));
    lines.extend(rows);
    if !owners.is_empty() {
        lines.push(bar(&colored(&owners), whole, width));
        lines.push(Line::from(legend(&owners, owned).into_iter().take(columns).collect::<Vec<_>>().concat()));
    }
    lines
}

fn color(index: usize) -> Color {
    COLORS[index.min(COLORS.len() - 1)]
}

fn colored(amounts: &[(String, u64)]) -> Vec<(Color, u64)> {
    amounts.iter().enumerate().map(|(index, (_, bytes))| (color(index), *bytes)).collect()
}

/// A bar of `width` columns for `whole` bytes.
fn bar(parts: &[(Color, u64)], whole: u64, width: usize) -> Line<'static> {
    let columns = |bytes: u64| (bytes as f64 / whole.max(1) as f64 * width as f64).round() as usize;
    let (mut spans, mut sum, mut drawn) = (Vec::new(), 0u64, 0);
    for (color, bytes) in parts {
        sum = sum.saturating_add(*bytes);
        // The sum is rounded, so that the bar is as long as it must be.
        let end = columns(sum).min(width);
        spans.push(Span::styled("█".repeat(end.saturating_sub(drawn)), Style::new().fg(*color)));
        drawn = drawn.max(end);
    }
    spans.push(Span::styled("░".repeat(width.saturating_sub(drawn)), Style::new().fg(Color::DarkGray)));
    Line::from(spans)
}

fn legend(amounts: &[(String, u64)], whole: u64) -> Vec<Vec<Span<'static>>> {
    let text = |index: usize, name: &str, bytes: u64| {
        entry(color(index), &format!("{name} {}", share_text(bytes, whole)), bytes)
    };
    amounts.iter().enumerate().map(|(index, (name, bytes))| text(index, name, *bytes)).collect()
}

/// `■ 1.51 GiB parameters 11 %`, as wide as an entry.
fn entry(color: Color, name: &str, bytes: u64) -> Vec<Span<'static>> {
    let text = cut(&format!("{} {name}", size_text(bytes)), ENTRY - 3);
    vec![Span::styled("■ ", Style::new().fg(color)), Span::raw(format!("{text:<width$} ", width = ENTRY - 3))]
}

/// At most `width` characters.
fn cut(text: &str, width: usize) -> String {
    text.chars().take(width).collect()
}

/// The header of the table, and as many of its lines as fit.
fn table(view: &View, height: usize) -> Vec<Line<'static>> {
    if view.device().is_none() {
        return Vec::new();
    }
    let mark = |sort: Sort, name: &str| if view.sort == sort { format!("{name}*") } else { name.to_owned() };
    let place = match view.table {
        Table::Stacks => "Allocated at",
        Table::Tensors => "Tensor",
    };
    let line = |bytes: &str, blocks: &str, category: &str, place: &str| {
        format!("{bytes:>9} {blocks:>8}  {category:<21} {place}")
    };
    let names = line(
        &mark(Sort::Bytes, "Bytes"),
        &mark(Sort::Blocks, "Blocks"),
        &mark(Sort::Category, "Category"),
        &mark(Sort::Place, place),
    );
    let mut lines = vec![Line::from(Span::styled(names, Style::new().add_modifier(Modifier::UNDERLINED)))];
    let rows = view.rows();
    if rows.is_empty() {
        let nothing = if view.search.is_empty() { "  nothing" } else { "  nothing has this text" };
        lines.push(Line::from(nothing));
    }
    for row in rows.iter().skip(view.scroll).take(height.saturating_sub(1)) {
        let blocks = memtrace_analysis::report::count_text(row.blocks);
        lines.push(Line::from(line(&size_text(row.bytes), &blocks, row.category, &shown(&row.place))));
    }
    lines
}

/// The last line: the search text, a message, or the keys.
fn foot(view: &View) -> Line<'static> {
    if view.is_searching {
        return Line::from(format!("/{}_", view.search));
    }
    if let Some(message) = &view.message {
        return Line::from(Span::styled(shown(message), Style::new().fg(Color::Red)));
    }
    let search = if view.search.is_empty() { "/ search".to_owned() } else { format!("/ {} (Esc clears)", view.search) };
    Line::from(format!("q quit  tab process  d device  t stacks/tensors  s sort  {search}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::live::keys::press;
    use memtrace_analysis::passes::{Category, Phase};
    use memtrace_analysis::report::{
        CategoryAmount, LiveGrowth, LiveProcessReport, LiveRecording, LiveReport, LiveStack, LiveTensor, OwnerBytes,
        Totals,
    };
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

    const GIB: u64 = 1 << 30;

    fn report() -> LiveReport {
        let stack = |location: &str, category, bytes, blocks| LiveStack {
            location: location.to_owned(),
            category,
            bytes,
            blocks,
        };
        let device = LiveDevice {
            device: 0,
            name: Some("NVIDIA H100".to_owned()),
            total_bytes: Some(80 * GIB),
            used_bytes: Some(50 * GIB),
            totals: Totals { allocated_bytes: 40 * GIB, reserved_bytes: 44 * GIB, ..Totals::default() },
            by_category: vec![
                CategoryAmount { category: Category::Parameter, bytes: 10 * GIB, blocks: 100 },
                CategoryAmount { category: Category::Activation, bytes: 30 * GIB, blocks: 50 },
            ],
            by_owner: vec![
                OwnerBytes { owner: "PyTorch's caching allocator".to_owned(), bytes: 44 * GIB },
                OwnerBytes { owner: "NCCL".to_owned(), bytes: GIB },
            ],
            stacks: vec![
                stack("model.py:88 forward", Category::Activation, 30 * GIB, 50),
                stack("train.py:7 load\u{1b}[2J", Category::Parameter, 10 * GIB, 100),
            ],
            tensors: vec![LiveTensor {
                name: "layers.0.weight".to_owned(),
                shape: "float32[4096, 4096]".to_owned(),
                category: Category::Parameter,
                bytes: 64 << 20,
            }],
            growth: LiveGrowth {
                per_step_bytes: Some(1 << 20),
                per_minute_bytes: Some(60 << 20),
                oom_in_ns: Some(3_600_000_000_000),
            },
            ..LiveDevice::default()
        };
        let process = |pid, rank| LiveProcessReport {
            pid,
            rank: Some(rank),
            events: 1234,
            step: Some(7),
            phase: Phase::Backward,
            devices: vec![device.clone()],
            ..LiveProcessReport::default()
        };
        let recording = LiveRecording {
            launcher_pid: 1,
            folder: "/home/user/memtrace-train".to_owned(),
            processes: vec![process(17, 0), process(18, 1)],
            ..LiveRecording::default()
        };
        LiveReport { recordings: vec![recording], ..LiveReport::default() }
    }

    /// The lines of the screen without trailing spaces.
    fn screen(view: &View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, view)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(line).collect()
    }

    fn press_all(view: &mut View, keys: &str) -> bool {
        let code = |letter| match letter {
            '\n' => KeyCode::Enter,
            '\t' => KeyCode::Tab,
            letter => KeyCode::Char(letter),
        };
        keys.chars()
            .map(|letter| press(view, KeyEvent::new(code(letter), KeyModifiers::NONE)))
            .fold(false, |_, quits| quits)
    }

    #[test]
    fn a_small_terminal_shows_bars_growth_and_stacks() {
        let lines = screen(&View::new(report()), 80, 24);
        let expected = [
            "rank 0 (pid 17)  process 1 of 2  memtrace-train",
            "step 7, backward, 1,234 events",
            "GPU 0  allocated 40.0 GiB, reserved 44.0 GiB, in use 50.0 GiB of 80.0 GiB (NVIDI",
        ];
        assert_eq!(lines[..3], expected);
        // 80 columns for 80 GiB.
        assert_eq!(lines[3], format!("{}{}", "█".repeat(44), "░".repeat(36)));
        assert_eq!(lines[4], format!("{:<39}{}", "■ 30.0 GiB activations 75 %", "■ 10.0 GiB parameters 25 %"));
        assert_eq!(lines[5], "■ 4.00 GiB reserved, unallocated");
        assert_eq!(lines[6], format!("{}{}", "█".repeat(45), "░".repeat(35)));
        let owners = &lines[7];
        assert!(owners.starts_with("■ 44.0 GiB PyTorch's caching allocator"), "{owners}");
        assert!(owners.ends_with("■ 1.00 GiB NCCL 2 %"), "{owners}");
        assert_eq!(lines[8], "growth +1.00 MiB/step, +60.0 MiB/min; out of memory in 60 min at this rate");
        assert_eq!(lines[9].trim(), "Bytes*   Blocks  Category              Allocated at");
        assert_eq!(lines[10], " 30.0 GiB       50  activations           model.py:88 forward");
        assert!(lines[11].contains("train.py:7 load") && !lines[11].contains('\u{1b}'), "{}", lines[11]);
        assert_eq!(lines[23], "q quit  tab process  d device  t stacks/tensors  s sort  / search");
    }

    #[test]
    fn keys_select_sort_and_search() {
        let mut view = View::new(report());
        let first_row = |view: &View| screen(view, 80, 24)[10].clone();
        assert!(!press_all(&mut view, "s"));
        assert!(first_row(&view).contains("train.py:7"), "by blocks: {}", first_row(&view));
        press_all(&mut view, "sss/MODEL");
        assert_eq!(screen(&view, 80, 24)[23], "/MODEL_");
        press_all(&mut view, "\n");
        assert_eq!(view.rows().len(), 1);
        press_all(&mut view, "/x\n");
        assert!(screen(&view, 80, 24).join("\n").contains("nothing has this text"));
        press(&mut view, KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE));
        press_all(&mut view, "t");
        assert!(first_row(&view).ends_with("layers.0.weight float32[4096, 4096]"), "{}", first_row(&view));
        press_all(&mut view, "\t");
        assert!(screen(&view, 80, 24)[0].starts_with("rank 1 (pid 18)  process 2 of 2"));
        // The selection stays when figures are refreshed, and when the other process ends.
        let mut later = report();
        later.recordings[0].processes.remove(0);
        view.update(later);
        assert!(screen(&view, 80, 24)[0].starts_with("rank 1 (pid 18)  process 1 of 1"));
        assert!(press_all(&mut view, "q"));
    }

    #[test]
    fn every_size_of_a_terminal_and_nothing_to_show_are_drawn() {
        for (width, height) in [(1, 1), (10, 3), (79, 12), (200, 60)] {
            screen(&View::new(report()), width, height);
            let empty = screen(&View::new(LiveReport::default()), width, height);
            assert!(width < 40 || empty[0] == "No process is being recorded", "{empty:?}");
        }
    }
}
