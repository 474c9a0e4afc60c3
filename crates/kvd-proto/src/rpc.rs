//! The rpcs of the service, as the wire's own description has them.

use prost::Message;
use prost_types::FileDescriptorSet;
use std::collections::HashMap;
use std::sync::LazyLock;

/// How many messages an rpc takes and answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RpcKind {
    /// One message, and one answer.
    Unary,
    /// A stream of messages on one side, or on both.
    Stream,
}

/// Kind of an rpc of `kvd.v1.Kvd` by its name; `None` for one that there is not.
#[must_use]
pub fn rpc_kind(name: &str) -> Option<RpcKind> {
    KINDS.get(name).copied()
}

/// Names of all rpcs of `kvd.v1.Kvd`.
pub fn rpc_names() -> impl Iterator<Item = &'static str> {
    KINDS.keys().map(String::as_str)
}

static KINDS: LazyLock<HashMap<String, RpcKind>> = LazyLock::new(read_kinds);

fn read_kinds() -> HashMap<String, RpcKind> {
    let described = FileDescriptorSet::decode(crate::FILE_DESCRIPTOR_SET).unwrap_or_default();
    let services = described.file.into_iter().flat_map(|file| file.service);
    let methods = services.flat_map(|service| service.method);
    let kind = |method: prost_types::MethodDescriptorProto| {
        let is_stream = method.client_streaming() || method.server_streaming();
        let kind = if is_stream { RpcKind::Stream } else { RpcKind::Unary };
        (method.name().to_owned(), kind)
    };
    methods.map(kind).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rpcs_are_known_by_their_kind() {
        for unary in ["GetServerInfo", "OpenSequence", "Attend"] {
            assert_eq!(rpc_kind(unary), Some(RpcKind::Unary), "{unary}");
        }
        for stream in ["StoreBlocks", "LoadBlocks", "HoldSession"] {
            assert_eq!(rpc_kind(stream), Some(RpcKind::Stream), "{stream}");
        }
        assert_eq!(rpc_kind("getserverinfo"), None);
        assert_eq!(rpc_kind(""), None);
    }
}
