//! The table of what each rpc needs: one line of each, and a test that none is missing.

use super::principals::AccessRole;

/// The needs of an rpc.
#[derive(Debug)]
pub(crate) struct RpcRights {
    rpc: &'static str,
    /// Any one of these will do.
    pub(super) roles: &'static [AccessRole],
    /// Whether it reads or changes what is of its namespace; others are about the daemon.
    pub(super) is_of_namespace: bool,
    /// Whether the audit log tells of it.
    pub(super) is_administrative: bool,
}

/// Whoever uses the daemon, be it for work, to operate it or to watch it.
const ANY: &[AccessRole] = &[AccessRole::Use, AccessRole::Operate, AccessRole::ReadMetrics];
/// Work on K and V.
const USE: &[AccessRole] = &[AccessRole::Use];
/// Both engines and operators: it shows and ends, but tells nothing of K and V.
const USE_OR_OPERATE: &[AccessRole] = &[AccessRole::Use, AccessRole::Operate];
/// Operators alone.
const OPERATE: &[AccessRole] = &[AccessRole::Operate];

const fn of_daemon(rpc: &'static str, roles: &'static [AccessRole]) -> RpcRights {
    RpcRights { rpc, roles, is_of_namespace: false, is_administrative: false }
}

const fn of_namespace(rpc: &'static str, roles: &'static [AccessRole]) -> RpcRights {
    RpcRights { rpc, roles, is_of_namespace: true, is_administrative: false }
}

const fn of_operators(rpc: &'static str, roles: &'static [AccessRole]) -> RpcRights {
    RpcRights { rpc, roles, is_of_namespace: true, is_administrative: true }
}

const fn of_daemon_operators(rpc: &'static str) -> RpcRights {
    RpcRights { rpc, roles: OPERATE, is_of_namespace: false, is_administrative: true }
}

static TABLE: [RpcRights; 41] = [
    of_daemon("GetServerInfo", ANY),
    of_daemon("ListCodecs", ANY),
    of_daemon("ListNamespaces", OPERATE),
    of_daemon_operators("SetNamespaceQuotas"),
    of_namespace("GetStats", ANY),
    of_namespace("RegisterModel", USE),
    of_namespace("DescribeModel", USE_OR_OPERATE),
    of_namespace("ListModels", USE_OR_OPERATE),
    of_operators("UnregisterModel", USE_OR_OPERATE),
    of_namespace("OpenSequence", USE),
    of_namespace("ForkSequence", USE),
    of_namespace("TruncateSequence", USE),
    of_namespace("HintSequence", USE),
    of_namespace("CloseSequence", USE_OR_OPERATE),
    of_namespace("DescribeSequence", USE_OR_OPERATE),
    of_namespace("ListSequences", USE_OR_OPERATE),
    of_namespace("HoldSession", USE),
    of_operators("CloseSession", USE_OR_OPERATE),
    of_namespace("ListSessions", USE_OR_OPERATE),
    of_namespace("StoreBlocks", USE),
    of_namespace("Attend", USE),
    of_namespace("AttendStream", USE),
    of_namespace("LoadBlocks", USE),
    of_namespace("SampleQueries", USE),
    of_namespace("CalibrateModel", USE),
    of_namespace("StoreStep", USE),
    of_namespace("LoadStep", USE),
    of_namespace("MatchPrefix", USE),
    of_namespace("ReleaseLease", USE),
    of_namespace("PublishBlocks", USE),
    of_operators("PinBlocks", USE),
    of_operators("UnpinBlocks", USE_OR_OPERATE),
    of_operators("DropBlocks", USE_OR_OPERATE),
    of_namespace("WatchBlocks", USE_OR_OPERATE),
    // No rpcs: calls of regions, and pages of the admin port. An overview has what lists have, of
    // the namespaces of its reader.
    of_namespace("OpenRegion", USE),
    of_namespace("AttendRegion", USE),
    of_namespace("StoreRegion", USE),
    of_daemon("ControlRegion", ANY),
    of_daemon("Reflection", ANY),
    of_daemon("Overview", USE_OR_OPERATE),
    of_daemon("Metrics", &[AccessRole::ReadMetrics]),
];

/// The needs of whatever is no rpc of kvd: gRPC answers it, but only to somebody.
static UNKNOWN: RpcRights = of_daemon("", ANY);

/// Finds what an rpc needs, by its name.
pub(crate) fn find_rights(rpc: &str) -> &'static RpcRights {
    TABLE.iter().find(|rights| rights.rpc == rpc).unwrap_or(&UNKNOWN)
}

impl RpcRights {
    /// Name of the rpc; empty for what is none of kvd's.
    pub(crate) fn rpc_name(&self) -> &'static str {
        self.rpc
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_rpc_of_the_service_has_its_line() {
        let names: BTreeSet<_> = TABLE.iter().map(|rights| rights.rpc).collect();
        assert_eq!(names.len(), TABLE.len(), "a line stands twice");
        for rpc in kvd_proto::rpc_names() {
            assert!(names.contains(rpc), "{rpc} has no line in the table of rights");
        }
        for rights in &TABLE {
            assert!(!rights.roles.is_empty(), "{}", rights.rpc);
            assert_eq!(find_rights(rights.rpc).rpc, rights.rpc);
        }
        assert_eq!(find_rights("Nothing").rpc_name(), "");
    }
}
