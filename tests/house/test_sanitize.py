"""How the sanitizer run reads what the tools print."""

from __future__ import annotations

from benchmarks.sanitize import FOUND, Finding, foreign_races

CUDNN, OURS = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "triton_tem_fused_attend_0"


def race(read: str, write: str) -> str:
    return (
        f"========= Error: Race reported between Read access at {read}+0x2e0\n"
        f"=========     and Write access at {write}+0x4320 [16 hazards]\n========= \n"
    )


def test_races_inside_of_libraries_are_counted_apart() -> None:
    assert foreign_races(race(CUDNN, CUDNN) * 2) == 2
    assert foreign_races(race(CUDNN, CUDNN) + race(OURS, OURS) + race(CUDNN, OURS)) == 1
    assert foreign_races("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)") == 0


def test_clean_is_a_program_that_ended_and_nothing_found_in_our_kernels() -> None:
    def found(status: int, errors: int | None, foreign: int = 0) -> bool:
        return Finding("case", "racecheck", status, errors, 1.0, "", foreign).clean

    assert found(0, 0)
    assert found(FOUND, 2, 2)
    assert not found(FOUND, 3, 2), "a race of ours"
    assert not found(1, 0), "the program failed"
    assert not found(-1, None), "not done in time"
    assert not found(0, 2, 2), "errors without the tool's status"
