//! Bytes in, bytes out: gRPC over TCP and Unix sockets, regions of shared memory. No logic of the
//! daemon lives here.

mod admission;
mod authority;
mod bytes;
mod cache;
mod call;
mod connection;
mod convert;
mod deadline;
mod discovery;
pub(crate) mod encoded_codec;
mod grpc;
mod health;
mod layer;
mod load;
mod measure;
mod refusal;
mod region;
mod server;
mod session;
mod socket;
mod step;
mod stream;
mod watch;

pub use connection::ServerPhase;
pub(crate) use server::connections_gauge;
pub use server::{BoundAddresses, GrpcServer, ListenError};
