"""Shared planes: stores that hold the same plane tensors until one of them is written.

Kernels write planes in place, and a plane is one tensor, so all of it is copied at the first write. Sharing is read from the tensors
themselves: a store that has grown or was emptied holds others. The last store that holds a plane writes it in place.
"""

from __future__ import annotations

import weakref

from kvcompile.runtime.store.store import Store, ordinary


def forked(store: Store) -> Store:
    """Return a second store with the planes of ``store``; call ``own`` before a write to either of them."""
    with ordinary():
        made = store.alike(list(store.planes))
    made.padding = forked(store.padding) if store.padding else None
    family = weakref.WeakSet([store]) if store.family is None else store.family
    store.family = made.family = family
    family.add(made)
    return made


LOADED: weakref.WeakValueDictionary[int, Store] = weakref.WeakValueDictionary()
"""Stores made from planes that were read from a pickle, by the identity of each plane."""


def joined(store: Store) -> Store:
    """Register a store made from a pickle's planes as a fork of each earlier store with one of these planes, and return it.

    A pickle holds each tensor once, however many forks have it; loaded, it is one tensor again.
    """
    for plane in store.planes:
        other = LOADED.get(id(plane))
        # The identity of a plane that is no more may be that of another tensor.
        if other is not None and other is not store and any(plane is held for held in other.planes):
            family = weakref.WeakSet([other]) if other.family is None else other.family
            other.family = store.family = family
            family.add(store)
        LOADED[id(plane)] = store
    return store


def own(store: Store, written: bool = True) -> bool:
    """Copy the planes that other stores hold too, before they are written; return whether any was copied.

    ``written``: False for a call that only reads tokens; it writes the ``tally`` planes alone. Constant planes stay shared.
    """
    if store.family is None:
        return False
    others = [other for other in store.family if other is not store]
    taken = {id(plane) for other in others for plane in other.planes}
    shared = [
        index for index, (plane, spec) in enumerate(store.described())
        if id(plane) in taken and not spec.constant and (written or spec.tally)
    ]
    with ordinary():
        for index in shared:
            # One at a time, so that only one plane exists twice.
            store.planes[index] = store.copied(index)
    if written or not others:
        store.family.discard(store)
        store.family = None
    return bool(shared)
