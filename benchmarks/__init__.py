"""What torchguard costs: programs that measure it, and the records of what they found."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # for ``support``
