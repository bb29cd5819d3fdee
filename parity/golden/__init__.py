"""Every stored truth behind one way to find it, read it, leave a new one pending and accept it."""
