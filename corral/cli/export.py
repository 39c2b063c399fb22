"""`corral export`: a policy as a file for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from corral.cli.options import Checkpoint, RunDir, Trust


@dataclass(frozen=True)
class Export:
    """Export a run's policy as ONNX or TorchScript: raw observations in, deterministic actions out, any batch size.

    The file is compared with the policy, and removed if its actions differ.
    """

    run_dir: RunDir
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = Path("policy.onnx")
    """File to write: .onnx, or .pt for TorchScript."""
    checkpoint: Checkpoint = "best"
    trust: Trust = False

    def run(self) -> int:
        from corral.runs.export.file import export
        from corral.runs.load import load_policy, trust

        if self.trust:
            trust(self.run_dir)
        written = export(load_policy(self.run_dir, self.checkpoint), self.out)
        print(f"Wrote {written.path}, {written.path.stat().st_size:,} bytes")
        print(f"Inputs: {', '.join(map(str, written.inputs))}")
        print(f"Outputs: {', '.join(map(str, written.outputs))}")
        print(
            f"Largest difference from the policy, over {written.observations} random observations: "
            f"{written.difference:.1e}"
        )
        return 0
