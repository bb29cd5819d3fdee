"""The checks that judge an implementation, one module a level; thin pytest files over them; profiles and the record."""
