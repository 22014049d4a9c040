"""Dry runs of inference servers beside startup logs that people published, with their flags.

`docs/dev/dry-run/servers.json` has the models, the logs and the figures of the dry runs. `published.py NAME...` runs these cases (all:
`published.py all`) and stores their figures there; `published.py --table` prints the table of `docs/dev/dry-run.md`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional

from dry_runs import ROOT, dry_run, free_port, installed

DATA = ROOT / "docs" / "dev" / "dry-run" / "servers.json"
# The packages that an old server needs beside its own, whose requirements have no upper bounds.
HELD_BACK = {"vllm==0.8.5.post1": ["transformers==4.51.3"]}
# The figures of a log, the patterns that find them, and how far a dry run may be off.
FIGURES = {
    "weights_gib": (r"(?:oading model weights|Model loading) took ([\d.]+)|Load weight end\..*mem usage=([\d.]+) GB", 0.001),
    "activations_gib": (r"PyTorch activation peak memory takes ([\d.]+)GiB", 0.03),
    "kv_cache_gib": (r"reserved for KV Cache is ([\d.]+)GiB|Available KV cache memory: ([\d.]+) GiB", 0.02),
    "kv_cache_tokens": (r"GPU KV cache size: ([\d,]+) tokens|# cuda blocks: (\d+)|max_total_num_tokens=(\d+)", 0.02),
}
# Of ranks, the one with the most weights and activations, and the one with the least space for a cache.
MOST = ("weights_gib", "activations_gib")
BLOCK_TOKENS = 16


def figures_of(log: str) -> Dict[str, float]:
    """The figures that a server logged."""
    found = {}
    for name, (pattern, _) in FIGURES.items():
        matches = list(re.finditer(pattern, log))
        values = [float(next(filter(None, one.groups())).replace(",", "")) for one in matches]
        if values:
            in_blocks = "blocks" in matches[0][0]
            found[name] = (max if name in MOST else min)(values) * (BLOCK_TOKENS if in_blocks else 1)
    return found


def write_model(folder: Path, model: Dict[str, Any]) -> None:
    """A configuration, and a tokenizer of a few words: old versions of vLLM need one. `model` can have special tokens with their
    ids, and other files.
    """
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number + 3 for number in range(1000)}, **model.get("special_tokens", {})}
    flags = {flag: False for flag in ("single_word", "lstrip", "rstrip", "normalized")}
    special = [{"id": number, "content": token, "special": True, **flags} for token, number in model.get("special_tokens", {}).items()]
    splits = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "added_tokens": special, "pre_tokenizer": {"type": "Whitespace"}, "model": splits}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    files = {"config": model["config"], "tokenizer": tokenizer, "tokenizer_config": settings, **model.get("files", {})}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def run(case: Dict[str, Any], models: Dict[str, Any]) -> Dict[str, float]:
    """Runs a case, and returns the figures of its log."""
    package = case["engine"]
    server = installed(package, *HELD_BACK.get(package, []))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, models[case["model"]])
        start = ["vllm", "serve", name] if package.startswith("vllm") else ["python", "-m", "sglang.launch_server", "--model-path", name]
        command = [f"{server}/bin/{start[0]}", *start[1:], "--load-format", "dummy", "--port", str(free_port()), *case["flags"]]
        memory = ["--memory", case["memory"]] if "memory" in case else []
        options = ["--gpu", case["gpu"], "--gpus", str(case.get("gpus", 1)), "--until-ready", *memory]
        output = folder / "output.txt"
        with output.open("w") as file:
            result = dry_run(server, command, options, case.get("environment", {}), folder, file)
        log = output.read_text(errors="replace")
    found = figures_of(log)
    # Some published logs end with an error after these figures, and so do their dry runs.
    if result.returncode != 0 and not case.get("fails"):
        print(log[-3000:], file=sys.stderr)
        raise SystemExit(f"{case['name']} ended with {result.returncode}")
    return found


def is_off(published: float, measured: float, limit: float) -> bool:
    """Whether a dry run is further off than its limit and than the last digit of most logs."""
    return abs(measured / published - 1) > limit and abs(measured - published) > 0.0051


def cell(published: Optional[float], measured: Optional[float], limit: float) -> str:
    """Both figures, and how far the dry run is off."""
    if published is None or measured is None:
        return ""
    off = measured / published - 1
    text = "the same" if abs(measured - published) <= 0.0051 else f"{off:+.2%}"
    return f"{published:,.7g}, {measured:,.7g} ({'**' if is_off(published, measured, limit) else ''}{text}{'**' if is_off(published, measured, limit) else ''})"


def misses(case: Dict[str, Any]) -> List[str]:
    """The figures by which a dry run is off."""
    return [name for name, (_, limit) in FIGURES.items() if name in case["log"] and is_off(case["log"][name], case["dry_run"][name], limit)]


def table(data: Dict[str, Any]) -> str:
    """The Markdown table of the cases, and why some are off."""
    lines = ["| Log | Model, GPUs | Options | Dry run with | Weights (GiB) | Activations (GiB) | KV cache (GiB) | KV cache (tokens) |",
             "|---|---|---|---|---|---|---|---|"]
    reasons = []
    for case in data["cases"]:
        cells = [cell(case["log"].get(name), case["dry_run"].get(name), limit) for name, (_, limit) in FIGURES.items()]
        count = case.get("gpus", 1)
        gpus = f"{count} x {case['gpu']}" if count > 1 else case["gpu"]
        settings = [f"{name}={value}" for name, value in case.get("environment", {}).items()]
        options = " ".join([*settings, *case["flags"]])
        lines.append("| " + " | ".join([case["source"], f"{case['model']}, {gpus}", f"`{options}`" if options else "", case["engine"].replace("==", " "), *cells]) + " |")
        if misses(case):
            reasons.append(f"- {case['source']}, {case['model']}: {case['why']}")
    return "\n".join([*lines, "", *reasons])


def main(names: List[str]) -> None:
    data = json.loads(DATA.read_text())
    if names == ["--table"]:
        print(table(data))
        return
    for case in data["cases"]:
        if case["name"] in names or names == ["all"]:
            case["dry_run"] = run(case, data["models"])
            print(case["name"], case["log"], case["dry_run"], flush=True)
            latest = json.loads(DATA.read_text())
            next(one for one in latest["cases"] if one["name"] == case["name"])["dry_run"] = case["dry_run"]
            DATA.write_text(json.dumps(latest, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
