//! Bytes in, bytes out: gRPC over TCP and Unix sockets. No logic of the daemon lives here.

mod call;
mod convert;
mod grpc;
mod measure;
mod server;
mod socket;
mod stream;

pub use server::{BoundAddresses, GrpcServer, ListenError};
