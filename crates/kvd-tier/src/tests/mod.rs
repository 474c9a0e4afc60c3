//! Tests of the whole tier: on a simulated folder that crashes, and on real ones.

mod faults;
mod folder;
mod hostile;
mod model;
mod sim;
mod torn;
