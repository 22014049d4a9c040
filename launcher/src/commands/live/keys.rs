//! The keys of the terminal view.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::view::{Sort, Table, View};

/// The number of rows that a page key moves.
const PAGE: usize = 10;

/// Handles a key. Returns whether the user quits.
pub(super) fn press(view: &mut View, key: KeyEvent) -> bool {
    if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
        return true;
    }
    if view.is_searching {
        match key.code {
            KeyCode::Enter => view.is_searching = false,
            KeyCode::Esc => {
                view.is_searching = false;
                view.search.clear();
            }
            KeyCode::Backspace => drop(view.search.pop()),
            KeyCode::Char(letter) => view.search.push(letter),
            _ => {}
        }
        view.scroll = 0;
        return false;
    }
    let last = view.rows().len().saturating_sub(1);
    match key.code {
        KeyCode::Char('q') => return true,
        KeyCode::Esc => view.search.clear(),
        KeyCode::Char('/') => view.is_searching = true,
        KeyCode::Tab | KeyCode::Right => view.select_process(1),
        KeyCode::BackTab | KeyCode::Left => view.select_process(-1),
        KeyCode::Char('d') => view.select_next_device(),
        KeyCode::Char('t') => {
            view.table = if view.table == Table::Stacks { Table::Tensors } else { Table::Stacks };
            view.scroll = 0;
        }
        KeyCode::Char('s') => {
            view.sort = match view.sort {
                Sort::Bytes => Sort::Blocks,
                Sort::Blocks => Sort::Category,
                Sort::Category => Sort::Place,
                Sort::Place => Sort::Bytes,
            };
        }
        KeyCode::Down => view.scroll = (view.scroll + 1).min(last),
        KeyCode::Up => view.scroll = view.scroll.saturating_sub(1),
        KeyCode::PageDown => view.scroll = (view.scroll + PAGE).min(last),
        KeyCode::PageUp => view.scroll = view.scroll.saturating_sub(PAGE),
        KeyCode::Home => view.scroll = 0,
        KeyCode::End => view.scroll = last,
        _ => {}
    }
    false
}
