"""The part of fxgrad that is written in C++: built when it pays, loaded where it is there, never needed."""
