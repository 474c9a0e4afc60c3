//! Actors shared by the end-to-end tests.
