// Standard C++, which works everywhere. Every other set is tested against it.
