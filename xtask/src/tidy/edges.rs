//! Who may depend on whom. The table is the architecture; an edge that is not in it fails.

use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Each member and the members it may use.
const MEMBERS: &[(&str, &[&str])] = &[
    ("kvd-core", &[]),
    ("kvd-codec", &["kvd-core"]),
    // Makes calibrations; no page is written or read with it.
    ("kvd-fit", &["kvd-core", "kvd-codec"]),
    ("kvd-compute", &["kvd-core", "kvd-codec"]),
    ("kvd-cuda", &["kvd-core", "kvd-codec", "kvd-compute"]),
    // Runs the kernels on the CPU, in its own tests alone.
    ("kvd-emu", &[]),
    ("kvd-store", &["kvd-core"]),
    ("kvd-proto", &["kvd-core"]),
    ("kvd-shm", &["kvd-core"]),
    ("kvd-client", &["kvd-core", "kvd-proto", "kvd-shm"]),
    // The client for other languages.
    ("kvd-c", &["kvd-core", "kvd-client", "kvd-shm"]),
    // Knows records and files, not what is in them.
    ("kvd-tier", &[]),
    // Records in stores of others.
    ("kvd-remote", &["kvd-tier"]),
    ("kvd-engine", &["kvd-core"]),
    // Measurement and demonstration are clients like any other.
    ("kvd-eval", &["kvd-core", "kvd-codec", "kvd-fit", "kvd-client", "kvd-engine"]),
    // Measures devices and, as a client, daemons that somebody else starts.
    (
        "kvd-bench",
        &["kvd-core", "kvd-codec", "kvd-fit", "kvd-compute", "kvd-store", "kvd-tier", "kvd-client"],
    ),
    (
        "kvd",
        &[
            "kvd-core",
            "kvd-bench",
            "kvd-codec",
            "kvd-fit",
            "kvd-compute",
            "kvd-cuda",
            "kvd-store",
            "kvd-proto",
            "kvd-shm",
            "kvd-tier",
            "kvd-remote",
            "kvd-client",
            "kvd-eval",
        ],
    ),
    // Used by tests alone: of every crate, and of fuzzing.
    ("kvd-testkit", &["kvd-core", "kvd-codec", "kvd-fit", "kvd-compute", "kvd-client", "kvd-shm"]),
    // Only tests use the daemon as a library.
    (
        "kvd-tests",
        &[
            "kvd-core",
            "kvd-codec",
            "kvd-fit",
            "kvd-proto",
            "kvd-shm",
            "kvd-testkit",
            "kvd-tier",
            "kvd-client",
            "kvd-c",
            "kvd-eval",
            "kvd",
        ],
    ),
    ("xtask", &[]),
];

/// Further crates that a member may use in its own tests.
const TESTS: &[(&str, &[&str])] = &[
    // A fake daemon answers the evaluation's client; the real one would be an edge upwards.
    ("kvd-eval", &["kvd-proto"]),
    // A daemon compiles kernels for every GPU.
    ("xtask", &["kvd-cuda"]),
    // Descriptors come over a Unix socket.
    ("kvd-cuda", &["kvd-shm", "kvd-testkit"]),
    ("kvd-codec", &["kvd-testkit", "kvd-fit"]),
    ("kvd-compute", &["kvd-testkit", "kvd-fit"]),
    ("kvd", &["kvd-testkit"]),
    // The daemon, and a client of it, over the CUDA backend with its kernels on the CPU.
    (
        "kvd-emu",
        &[
            "kvd-core",
            "kvd-codec",
            "kvd-fit",
            "kvd-compute",
            "kvd-cuda",
            "kvd-client",
            "kvd-testkit",
            "kvd",
        ],
    ),
];

/// Crates that a member must never reach, not even through others.
const NEVER: &[(&str, &[&str])] = &[
    ("kvd-core", &["tokio", "tonic", "cudarc"]),
    ("kvd-codec", &["tokio", "tonic", "cudarc"]),
    ("kvd-fit", &["tokio", "tonic", "cudarc"]),
    // What serves fits nothing; the daemon does, when it is asked to calibrate.
    ("kvd-compute", &["tokio", "tonic", "cudarc", "kvd-fit"]),
    ("kvd-cuda", &["tokio", "tonic", "kvd-fit"]),
    ("kvd-client", &["kvd-fit"]),
    ("kvd-store", &["tonic", "cudarc"]),
    ("kvd-tier", &["tokio", "tonic", "cudarc"]),
    ("kvd-remote", &["tonic", "cudarc"]),
    ("kvd-proto", &["cudarc"]),
];

/// Checks the workspace that `cargo metadata` describes.
pub(super) fn check_edges(metadata: &Value) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    let members = list_members(metadata)?;
    let names: BTreeSet<&str> = members.iter().map(|package| name_of(package)).collect();
    for package in &members {
        let user = name_of(package);
        let Some((_, allowed)) = MEMBERS.iter().find(|(member, _)| *member == user) else {
            findings.push(format!("{user}: not in the table of xtask/src/tidy/edges.rs"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let used = name_of(dependency);
            let in_tests = dependency["kind"] == "dev"
                && TESTS.iter().any(|(member, extra)| *member == user && extra.contains(&used));
            if names.contains(used) && !allowed.contains(&used) && !in_tests {
                findings.push(format!("{user} must not depend on {used}"));
            }
            // A production build leaves the evaluation and its engine out.
            if user == "kvd" && used == "kvd-eval" && dependency["optional"] != true {
                findings.push("kvd: the dependency on kvd-eval must be optional".to_owned());
            }
        }
    }
    findings.extend(check_reach(metadata, &members)?);
    Ok(findings)
}

/// The packages of the workspace.
pub(super) fn list_members(metadata: &Value) -> Result<Vec<&Value>> {
    let ids = metadata["workspace_members"].as_array().context("metadata: workspace_members")?;
    let packages = metadata["packages"].as_array().context("metadata: packages")?;
    Ok(packages.iter().filter(|package| ids.contains(&package["id"])).collect())
}

fn name_of(value: &Value) -> &str {
    value["name"].as_str().unwrap_or_default()
}

fn check_reach(metadata: &Value, members: &[&Value]) -> Result<Vec<String>> {
    let packages = metadata["packages"].as_array().context("metadata: packages")?;
    let id = |package: &Value| package["id"].as_str().unwrap_or_default().to_owned();
    let names: BTreeMap<String, &str> =
        packages.iter().map(|package| (id(package), name_of(package))).collect();
    let graph = read_graph(metadata)?;
    let mut findings = Vec::new();
    for (member, never) in NEVER {
        let Some(package) = members.iter().find(|package| name_of(package) == *member) else {
            continue;
        };
        let reached = find_reached(&graph, id(package));
        let reached: BTreeSet<&str> =
            reached.iter().filter_map(|id| names.get(id).copied()).collect();
        for used in never.iter().filter(|used| reached.contains(*used)) {
            findings.push(format!("{member} must never reach {used}: `cargo tree -i {used}`"));
        }
    }
    Ok(findings)
}

/// Package id to the ids it uses when it is built, tests left out.
fn read_graph(metadata: &Value) -> Result<BTreeMap<String, Vec<String>>> {
    let nodes = metadata["resolve"]["nodes"].as_array().context("metadata: resolve.nodes")?;
    let mut graph = BTreeMap::new();
    for node in nodes {
        let mut used = Vec::new();
        for dependency in node["deps"].as_array().into_iter().flatten() {
            let mut kinds = dependency["dep_kinds"].as_array().into_iter().flatten();
            if kinds.any(|kind| kind["kind"] != "dev") {
                used.push(dependency["pkg"].as_str().unwrap_or_default().to_owned());
            }
        }
        graph.insert(node["id"].as_str().unwrap_or_default().to_owned(), used);
    }
    Ok(graph)
}

fn find_reached(graph: &BTreeMap<String, Vec<String>>, from: String) -> BTreeSet<String> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(id) = open.pop() {
        for used in graph.get(&id).into_iter().flatten() {
            if reached.insert(used.clone()) {
                open.push(used.clone());
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A workspace of (user, used, kind) edges; `tokio` and `prost` are foreign.
    fn workspace(edges: &[(&str, &str, Option<&str>)]) -> Value {
        let foreign = ["tokio", "prost"];
        let all: BTreeSet<&str> = edges.iter().flat_map(|edge| [edge.0, edge.1]).collect();
        let (mut packages, mut nodes) = (Vec::new(), Vec::new());
        for user in &all {
            let (mut dependencies, mut deps) = (Vec::new(), Vec::new());
            for (_, used, kind) in edges.iter().filter(|edge| edge.0 == *user) {
                dependencies.push(json!({"name": used, "kind": kind}));
                deps.push(json!({"pkg": used, "dep_kinds": [{"kind": kind}]}));
            }
            packages.push(json!({"id": user, "name": user, "dependencies": dependencies}));
            nodes.push(json!({"id": user, "deps": deps}));
        }
        let members: Vec<&&str> = all.iter().filter(|name| !foreign.contains(name)).collect();
        json!({
            "workspace_members": members,
            "packages": packages,
            "resolve": {"nodes": nodes},
        })
    }

    fn findings(edges: &[(&str, &str, Option<&str>)]) -> Vec<String> {
        check_edges(&workspace(edges)).unwrap()
    }

    #[test]
    fn edges_of_the_table_pass() {
        let none = findings(&[
            ("kvd-codec", "kvd-core", None),
            ("kvd-client", "kvd-proto", None),
            ("kvd-client", "tokio", None),
            ("kvd-tests", "kvd", None),
        ]);
        assert_eq!(none, Vec::<String>::new());
    }

    #[test]
    fn edge_of_tests_passes_in_tests_only() {
        assert_eq!(findings(&[("kvd-eval", "kvd-proto", Some("dev"))]), Vec::<String>::new());
        let found = findings(&[("kvd-eval", "kvd-proto", None)]);
        assert_eq!(found, ["kvd-eval must not depend on kvd-proto"]);
    }

    #[test]
    fn edge_outside_the_table_fails_in_every_kind() {
        for kind in [None, Some("dev"), Some("build")] {
            let found = findings(&[("kvd-store", "kvd-codec", kind)]);
            assert_eq!(found, ["kvd-store must not depend on kvd-codec"]);
        }
        assert_eq!(findings(&[("kvd-eval", "kvd", None)]), ["kvd-eval must not depend on kvd"]);
    }

    #[test]
    fn member_without_a_row_and_mandatory_demo_fail() {
        let found = findings(&[("kvd-new", "kvd-core", None)]);
        assert!(found[0].starts_with("kvd-new: not in the table"), "{found:?}");
        let found = findings(&[("kvd", "kvd-eval", None)]);
        assert_eq!(found, ["kvd: the dependency on kvd-eval must be optional"]);
    }

    #[test]
    fn forbidden_reach_is_found_through_others_but_not_through_tests() {
        let found = findings(&[("kvd-codec", "prost", None), ("prost", "tokio", None)]);
        assert_eq!(found, ["kvd-codec must never reach tokio: `cargo tree -i tokio`"]);
        let found = findings(&[("kvd-codec", "prost", Some("dev")), ("prost", "tokio", None)]);
        assert_eq!(found, Vec::<String>::new());
    }
}
