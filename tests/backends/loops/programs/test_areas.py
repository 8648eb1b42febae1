"""Where values lie: addresses in images with borders and parts, and memory that values share one after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.programs.areas import ARENA, LANES, SLACK_BYTES, Area, lay_out

pytestmark = pytest.mark.any_cpu

BORDERS = st.tuples(*[st.integers(0, 3)] * 4)
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 40))


@given(SHAPES, BORDERS, st.booleans())
def test_pixels_lie_as_in_an_array_with_a_border(shape, border, is_float):
    area = Area(shape, is_float, offset=640)
    area.widen(border)
    above, left, below, right = border
    n, h, w, c = shape
    whole = (n, above + h + below, left + w + right, -(-c // LANES) * LANES)
    assert area.nbytes == np.prod(whole) * (4 if is_float else 1)
    assert area.byte_strides == list(np.empty(whole, np.float32 if is_float else np.uint8).strides[:3])
    assert area.start == [ARENA, 640] and area.origin == [ARENA, 640 + area.size * area.place(0, 0)]
    for row, column in ((-above, -left), (0, 0), (h + below - 1, w + right - 1)):
        assert area.place(row, column) == np.ravel_multi_index((0, row + above, column + left, 0), whole)


def test_a_border_only_grows():
    area = Area((1, 4, 4, 16), False)
    area.widen((1, 0, 2, 0))
    area.widen((0, 3, 1, 0))
    assert area.border == (1, 3, 2, 0)


def test_room_for_channels():
    assert [Area((1, 1, 1, c)).pixel_stride for c in (1, 16, 17)] == [16, 16, 32]
    assert Area((1, 1, 1, 3), room=3).pixel_stride == 3


def test_a_part_lies_among_the_channels_of_the_whole():
    whole, inner, part = Area((2, 3, 3, 64), False), Area((2, 3, 3, 32), False), Area((2, 3, 3, 16), False)
    part.widen((1, 0, 0, 0))
    part.become_part(inner, 16)
    inner.become_part(whole, 32)
    part.widen((0, 0, 2, 1))
    whole.offset = 128
    assert whole.border == (1, 0, 2, 1)  # that of the part from before, and from later
    assert part.root is inner.root is whole
    assert (
        (part.pixel_stride, part.row_stride, part.sample_stride)
        == (whole.pixel_stride, whole.row_stride, whole.sample_stride)
        == (64, 4 * 64, 6 * 4 * 64)
    )
    assert part.place(1, 1) == whole.place(1, 1) + 48
    assert part.start == whole.start and part.origin == [ARENA, whole.origin[1] + 48]


@st.composite
def lives(draw):
    """Areas in the order in which they are written, of a program of a few steps. Many are of the same kind."""
    areas = []
    for i in range(draw(st.integers(1, 12))):
        shape = draw(st.sampled_from([(1, 1, 1, 5), (1, 4, 4, 16), (2, 3, 5, 33), (2, 8, 8, 16)]))
        border = draw(st.sampled_from([(0, 0, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1), (0, 2, 1, 0)]))
        zero, last = draw(st.sampled_from([0, 7])), draw(st.integers(i, 14))
        area = Area(
            shape, draw(st.booleans()) and not any(border), zero=zero, border=border, first_step=i, last_step=last
        )
        areas.append(area)
    return areas


def pixels(memory, area):
    """The bytes of an area in memory, with its border."""
    n, h, w, _ = area.shape
    rows, columns = h + area.border[0] + area.border[2], w + area.border[1] + area.border[3]
    return memory[area.offset : area.offset + area.nbytes].reshape(n, rows, columns, area.pixel_stride * area.size)


def inside(area, image):
    above, left, _, _ = area.border
    return image[:, above : above + area.shape[1], left : left + area.shape[2]]


@given(lives())
@settings(max_examples=74)
def test_what_lives_at_once_shares_no_memory(areas):
    """A program that writes each area as its step comes finds it as it was at its last step, and borders untouched."""
    arena = lay_out(areas)
    memory = np.full(arena.nbytes, 255, np.uint8)
    for offset, count, value in arena.filled:
        memory[offset : offset + count] = value
    for step in range(15):
        for i, area in enumerate(areas):
            if area.first_step == step:
                assert area.offset % 64 == 0 and area.offset + area.nbytes + SLACK_BYTES <= arena.nbytes
                inside(area, pixels(memory, area))[:] = 100 + i
        for i, area in enumerate(areas):
            if area.first_step <= step <= area.last_step:
                image = pixels(memory, area).copy()
                assert (inside(area, image) == 100 + i).all()
                inside(area, image)[:] = area.zero
                assert not any(area.border) or (image == area.zero).all()


@pytest.mark.slow
@given(lives())
def test_areas_in_use_at_once_do_not_overlap_with_their_slack(areas):
    """Up to `SLACK_BYTES` bytes after a value belong to it: two that live at once are that far apart."""
    lay_out(areas)
    for area in areas:
        for second in areas:
            if area is not second and area.first_step <= second.last_step and second.first_step <= area.last_step:
                assert area.offset + area.nbytes + SLACK_BYTES <= second.offset or (
                    second.offset + second.nbytes + SLACK_BYTES <= area.offset
                )


def test_a_chain_needs_two_places():
    areas = [Area((1, 8, 8, 16), False, first_step=i, last_step=i + 1) for i in range(10)]
    assert lay_out(areas).nbytes == 2 * (8 * 8 * 16 + 64)


def test_a_large_place_is_divided():
    large = Area((1, 8, 8, 16), False, first_step=0, last_step=0)
    small = [Area((1, 4, 8, 16), False, first_step=1, last_step=2) for _ in range(2)]
    assert lay_out([large, *small]).nbytes == 8 * 8 * 16 + 64 + 4 * 8 * 16 + 64
    assert small[0].offset == large.offset


def test_parts_have_the_place_of_the_whole():
    whole = Area((1, 2, 2, 32), False, first_step=0, last_step=3)
    parts = [Area((1, 2, 2, 16), False) for _ in range(2)]
    for k, part in enumerate(parts):
        part.become_part(whole, 16 * k)
    second = Area((1, 2, 2, 32), False, first_step=1, last_step=3)
    arena = lay_out([parts[0], second, parts[1]])
    assert arena.nbytes == 2 * (2 * 2 * 32 + 64) and second.offset != whole.offset


def test_borders_of_other_values_are_not_shared():
    areas = [
        Area((1, 4, 4, 16), False, zero=z, border=(1, 1, 1, 1), first_step=i, last_step=i)
        for i, z in enumerate((3, 4, 3))
    ]
    arena = lay_out(areas)
    assert areas[0].offset == areas[2].offset != areas[1].offset
    assert [value for _, _, value in arena.filled] == [3, 4]
