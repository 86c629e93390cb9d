// Turns the dot product on for the rest of the file. To be included after every other header.
#pragma GCC target("arch=armv8.2-a+dotprod")
