"""Allocates in many functions with long names. wide.py FOLDER FUNCTIONS: FOLDER gets the module with the functions."""

import pathlib
import sys

import torch

folder, functions = pathlib.Path(sys.argv[1]), int(sys.argv[2])
lines = ["import torch", "kept = []"]
for number in range(functions):
    lines += [f"def function_{number}_{'with_a_long_name_' * 12}():"]
    lines += [f"    kept.append(torch.empty({number + 1} << 12, device='cuda'))  # {'comment ' * 12}"] * 12
    lines += [f"function_{number}_{'with_a_long_name_' * 12}()"]
(folder / "generated.py").write_text("\n".join(lines) + "\n")
sys.path.insert(0, str(folder))
torch.zeros(1, device="cuda")
import generated  # noqa: E402, F401
