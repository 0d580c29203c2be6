"""The state that a program can change, listed once: snapshots of it, and how they are restored.

======================  =======================================================================
:mod:`tensors`          metadata (size, strides, storage, dtype) and elements, in bulk too
:mod:`containers`       dicts, lists, deques, sets, tuples and the attributes of objects
:mod:`modules`          parameters, buffers, children, attributes, hooks and the class
:mod:`optimizers`       options, state and attributes
:mod:`random`           generators: PyTorch's on each device in use, Python's, numpy's, your own
:mod:`modes`            grad mode and autocast of this thread
:mod:`interrupts`       signals wait while something is rolled back
:mod:`optimizer_state`  an optimizer's state dict, loaded to the parameters it belongs to
:mod:`open_steps`       the threads that are inside of a training step
======================  =======================================================================

A snapshot is an object with one method, ``restore()``. It restores in place: objects, tensors and
storages keep their identity, and containers that have not changed are not written. It may be called
several times.
``rollback_on_error``, ``transaction``, ``safe_checkpoint``, ``load_state_dict`` and the checks of
``verified`` and ``bucketed`` say what they take snapshots of, and when they roll back.
"""
