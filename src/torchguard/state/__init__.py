"""The state that a program can change, listed once: snapshots of it, and how they are restored.

======================  =======================================================================
:mod:`tensors`          metadata (size, strides, storage, dtype) and elements, in bulk too
:mod:`containers`       dicts, lists, deques, sets, tuples and the attributes of objects
:mod:`training`         modules (members, attributes, hooks), optimizers, and all of a training
:mod:`process`          signals, grad mode and autocast, every random generator, open steps
:mod:`optimizer_state`  an optimizer's state dict, loaded to the parameters it belongs to
======================  =======================================================================

A snapshot is an object with one method, ``restore()``. It restores in place: objects, tensors and
storages keep their identity, and containers that have not changed are not written. It may be called
several times.
``rollback_on_error``, ``transaction``, ``safe_checkpoint``, ``load_state_dict`` and the checks of
``verified`` and ``bucketed`` say what they take snapshots of, and when they roll back.
"""
