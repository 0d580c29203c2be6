"""Operations that fail are rolled back: resize_, set_, out=, blocks, checkpointed blocks."""
