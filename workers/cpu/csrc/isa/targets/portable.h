// Standard C++: correct everywhere, and what every other set is tested against.
