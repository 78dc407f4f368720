"""Records what PyTorch answers to ``torch_cases``: run with a Python that has torch 2.13.

python tests/tensor/record_torch.py [subject ...]
"""

from __future__ import annotations

import json
import sys

import parity
import torch


def main(subjects: list[str]) -> None:
    parity.RECORDED.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    for subject in subjects:
        found = {n: parity.answer(c, torch) for n, c in parity.cases(subject).items()}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
        path = parity.RECORDED / f"{subject}.json"
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        raised = [n for n, v in found.items() if isinstance(v, dict) and "raises" in v]
        print(f"{subject}: {len(found)} cases", f"(raising: {', '.join(raised)})" if raised else "")


if __name__ == "__main__":
    main(sys.argv[1:] or parity.SUBJECTS)
