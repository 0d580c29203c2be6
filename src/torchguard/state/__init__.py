"""What a program can change, listed once: take a snapshot of it, and restore it.

=================  ===========================================================================
:mod:`tensors`     metadata (size, strides, storage, dtype, grad mode) and elements, in bulk too
:mod:`containers`  dicts, lists, deques, sets, tuples and the attributes of objects
:mod:`modules`     parameters, buffers, children, attributes, hooks and the class of modules
:mod:`optimizers`  options, state and attributes of optimizers
:mod:`random`      every generator: PyTorch's on each device in use, Python's, numpy's, your own
:mod:`modes`       grad mode and autocast of this thread
:mod:`interrupts`  Ctrl-C waits while something is rolled back
=================  ===========================================================================

A snapshot is an object with one method, ``restore()``. It restores in place: objects, tensors and
storages keep their identity. It may be called several times, and touches only what differs.
``rollback_on_error``, ``transaction``, ``safe_checkpoint``, ``load_state_dict`` and the checks of
``verified`` and ``bucketed`` say what they take snapshots of, and when they roll back.
"""
