//! Parts of `kernels/gpu/*.py` that need no driver; whole they run over the CPU lane
//! (`crates/kvd-emu/tests/fixtures.rs`).

use super::known;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// What statements of Python print about the scripts, as JSON.
fn python(statements: &str) -> Value {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/gpu");
    let mut command = Command::new("python3");
    // They are imported where they lie, and leave nothing there.
    command.env("PYTHONPATH", scripts).args(["-B", "-c", statements]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_benchmark_refuses_by_name_what_a_run_refuses_and_by_multiprocessors_what_has_no_name() {
    let plans = [
        ("a100", "A100 80GB"),
        ("rtx4090", "RTX 4090"),
        ("l40s", "L40S"),
        ("h100", "H100 SXM"),
        ("h200", "H200 SXM"),
    ];
    // Of 132 multiprocessors.
    let mut asked = Vec::new();
    for (name, kind) in known::tests::NAMES {
        asked.extend(plans.map(|(plan, device)| (name, 132, device, kind != Some(plan))));
    }
    asked.extend([
        // An instance, by the driver's name, and what could be one.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 132, "H100 SXM", true),
        ("NVIDIA H100 80GB HBM3", 16, "H100 SXM", true),
    ]);
    let statements = format!(
        "import bench, json\n\
         of = lambda device: {{'device': device, 'multiprocessors': 132}}\n\
         print(json.dumps([bench.refusal(*gpu, of(plan)) for *gpu, plan, _ in {}]))",
        // Of the words of JSON, Python has those of numbers and texts.
        json!(asked).to_string().replace("true", "True").replace("false", "False")
    );
    let reasons = python(&statements);
    for ((name, count, device, is_refused), reason) in asked.iter().zip(reasons.as_array().unwrap())
    {
        assert_eq!(!reason.is_null(), *is_refused, "{name} for {device}: {reason}");
        let wanted = format!("this GPU is {name} with {count}: nothing is launched");
        assert!(reason.as_str().is_none_or(|reason| reason.ends_with(&wanted)), "{reason}");
    }
}
