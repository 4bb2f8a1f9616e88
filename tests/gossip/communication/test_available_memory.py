"""The memory that is left is what the tightest control group leaves, of either version."""

from pathlib import Path

import pytest

from gossip.communication.host import available_memory

GROUPS = {
    "0::/job/step": {"job/memory.max": "5000", "job/memory.current": "3000", "job/step/memory.max": "max"},
    "4:cpu,memory:/job/step\n0::/": {
        "memory/job/memory.limit_in_bytes": "5000",
        "memory/job/memory.usage_in_bytes": "3000",
    },
}


@pytest.mark.parametrize("own", GROUPS)
def test_the_group_s_limit_less_what_it_cannot_free(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "total_inactive_file 400\ninactive_file 300" if "memory" in own else "anon 7\ninactive_file 400"
    folder = "memory/job" if "memory" in own else "job"
    for name, text in {"own": own, f"{folder}/memory.stat": stat, **GROUPS[own]}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(available_memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(available_memory, "_OWN_GROUPS", tmp_path / "own")
    assert available_memory.available_bytes() == 5000 - 3000 + 400
