"""Programs about which fxgrad and the examiner do not agree yet, and why."""

from __future__ import annotations

#: By name: what is open.  A program leaves the list when it is judged right under all its seeds.
OPEN: dict[str, str] = {
    "where_never_taken": "a condition that never holds is only information in one step; arguable",
    "copied_into_data_of_buffer": "a copy into .data is a cut; the finding says that the result is dropped",
}
