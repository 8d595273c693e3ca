"""What Ray Serve runs.

The checkout's own package comes first on the path, as for the jobs.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "platform"))
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray otherwise decides by what it finds on the machine
