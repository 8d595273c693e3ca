"""What a person runs.

The checkout's own package comes first on the path, so that a snapshot uploaded by ``ray job submit`` runs its own code
even where another version is installed.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "platform"))
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray otherwise decides by what it finds on the machine
