"""Callbacks for trainers; each module needs the library it is named after."""
