"""The pages of a sequence's context, as attention on the CPU walks them."""

from __future__ import annotations

import numba


@numba.njit
def first_place(begin, block, tables, table, page_stride, token_stride):  # type: ignore[no-untyped-def]
    """Where the token at position `begin` lies."""
    page = tables[table + begin // block]
    return page * page_stride + begin % block * token_stride


@numba.njit
def pages(  # type: ignore[no-untyped-def]
    begin, context, block, tables, table, page_stride, token_stride, then
):
    """Yields (position, tokens, place, distance to the next page's place) for each page.

    `then` is the place to go to behind the last one.
    """
    position = begin
    place = first_place(begin, block, tables, table, page_stride, token_stride)
    while position < context:
        count = min(block - position % block, context - position)
        following, next_place = position + count, then
        if following < context:
            next_place = tables[table + following // block] * page_stride
        yield position, count, place, next_place - place
        position, place = following, next_place
