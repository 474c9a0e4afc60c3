//! Bytes in, bytes out: gRPC over TCP and Unix sockets, regions of shared memory. No logic of the
//! daemon lives here.

mod call;
mod connection;
mod convert;
mod deadline;
mod grpc;
mod health;
mod layer;
mod measure;
mod region;
mod server;
mod socket;
mod stream;

pub(crate) use connection::Connection;
pub use connection::Phase;
pub use server::{BoundAddresses, GrpcServer, ListenError};
