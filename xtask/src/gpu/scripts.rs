//! Parts of `kernels/gpu/*.py` that need no driver; whole they run over the CPU lane
//! (`crates/kvd-emu/tests/fixtures.rs`).

use super::known;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// The JSON that Python statements about the scripts print.
fn python(statements: &str) -> Value {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/gpu");
    let mut command = Command::new("python3");
    // They are imported where they lie, and leave nothing there.
    command.env("PYTHONPATH", scripts).args(["-B", "-c", statements]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Whether there is a Python to ask.
fn has_python() -> bool {
    let has = Command::new("python3").arg("--version").output().is_ok();
    if !has {
        eprintln!("SKIP scripts: no python3");
    }
    has
}

#[test]
fn the_benchmark_refuses_by_name_what_a_run_refuses_and_by_multiprocessors_what_has_no_name() {
    if !has_python() {
        return;
    }
    let plans = [
        ("a100", "A100 80GB"),
        ("rtx4090", "RTX 4090"),
        ("l40s", "L40S"),
        ("h100", "H100 SXM"),
        ("h200", "H200 SXM"),
    ];
    // For 132 multiprocessors.
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
        // Python reads JSON's numbers and texts, but not its words.
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

/// A driver that keeps the names of its calls and refuses one of them.
const FAKE: &str = r#"
import json
import driver

class Fake(driver.Cuda):
    def __init__(self, refused):
        self.refused, self.calls, self.stream = refused, [], driver.c_void_p(1)

    def code(self, name, *arguments):
        self.calls.append(name)
        # The first argument is what comes back.
        makes = ["cuGraphInstantiateWithFlags", "cuEventCreate"]
        if name in makes and name != self.refused:
            arguments[0].value = 7
        if name == "cuStreamEndCapture":
            arguments[1].value = 8
        return 1 if name == self.refused else 0

def of(refused):
    fake = Fake(refused)
    try:
        fake.time(lambda _: fake.call("cuLaunchKernel"), 2, 1)
    except RuntimeError as error:
        return [str(error), fake.calls]
    return [None, fake.calls]
"#;

#[test]
fn a_capture_ends_and_its_graph_goes_whichever_call_is_refused() {
    if !has_python() {
        return;
    }
    let refused = [
        None,
        Some("cuLaunchKernel"),
        Some("cuStreamEndCapture"),
        Some("cuGraphInstantiateWithFlags"),
        Some("cuGraphLaunch"),
        Some("cuEventCreate"),
        Some("cuEventRecord"),
    ];
    let asked = json!(refused).to_string().replace("null", "None");
    let all = python(&format!("{FAKE}\nprint(json.dumps([of(call) for call in {asked}]))"));
    for (refused, outcome) in refused.iter().zip(all.as_array().unwrap()) {
        let reason = refused.map(|call| format!("{call}: CUDA error 1"));
        assert_eq!(outcome[0].as_str(), reason.as_deref());
        let calls: Vec<_> = outcome[1].as_array().unwrap().iter().collect();
        let count = |name: &str| calls.iter().filter(|call| ***call == name).count();
        for (begins, ends) in [
            ("cuStreamBeginCapture_v2", "cuStreamEndCapture"),
            ("cuEventCreate", "cuEventDestroy_v2"),
        ] {
            // A refused call begins nothing that has to end.
            let begun = count(begins) - usize::from(*refused == Some(begins));
            assert_eq!(begun, count(ends), "{refused:?}: {calls:?}");
        }
        assert_eq!(count("cuGraphDestroy"), 1, "{refused:?}: {calls:?}");
        let made = count("cuGraphInstantiateWithFlags");
        let made = made - usize::from(*refused == Some("cuGraphInstantiateWithFlags"));
        assert_eq!(count("cuGraphExecDestroy"), made, "{refused:?}: {calls:?}");
    }
}
