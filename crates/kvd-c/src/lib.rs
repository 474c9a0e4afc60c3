//! The C interface of the client: `kvd.h` and the functions that it names.
//!
//! Pointers are tested for null and alignment and read once; what else `kvd.h` asks of a caller
//! cannot be tested here. No panic leaves a function. A connection is behind a lock that nobody
//! waits for.

mod args;
mod connection;
mod exports;
mod failure;

pub use args::{AttendArgs, ConnectArgs, ModelArgs, QueryArgs, RowsArgs, StoreArgs};
pub use exports::*;
pub use failure::{CallFailure, code_number};

/// Changes where a program that was compiled with an earlier header would no longer work.
pub const ABI_VERSION: u32 = 1;
