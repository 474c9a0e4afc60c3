//! The report as files, which are complete at any time and go on with those of an earlier run.

use super::{DAEMON_STORES, FIGURES, SHAPES, known, write};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Bytes of a step's output that the report keeps; the log has all.
const TAIL_BYTES: usize = 4000;
const NOT_RUN: &str = "not run yet";
/// Outcome of a step during which the run was ended from outside.
const BEGUN: &str = "begun, not ended";

/// One step of the report.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StepOutcome {
    pub(super) name: String,
    /// `passed`, `failed`, `stopped after …`, `skipped because …`, or that it was not run.
    pub(super) outcome: String,
    pub(super) seconds: f64,
    /// The end of it.
    pub(super) output: String,
}

/// The device and pack that a report describes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RunSubject {
    /// Name and driver.
    pub(super) device: String,
    pub(super) date: String,
    /// `pack`'s description of the folder; null if there is none.
    pub(super) pack: Value,
}

/// A report.
pub(super) struct KeptReport {
    pub(super) of: RunSubject,
    pub(super) steps: Vec<StepOutcome>,
    /// The benchmark's output; null if there is none.
    pub(super) bench: Value,
    /// Launches of shapes that are not measured.
    pub(super) shapes: Value,
    /// Stores that the daemon's step has timed.
    pub(super) daemon_stores: Value,
    out: PathBuf,
}

impl StepOutcome {
    pub(super) fn new(name: &str, outcome: String, seconds: f64, output: &str) -> Self {
        let start = output.len().saturating_sub(TAIL_BYTES);
        let start = (start..).find(|at| output.is_char_boundary(*at)).unwrap_or(0);
        Self { name: name.to_owned(), outcome, seconds, output: output[start..].to_owned() }
    }

    pub(super) fn begun(name: &str) -> Self {
        Self::new(name, BEGUN.to_owned(), 0.0, "")
    }

    fn not_run(name: &str) -> Self {
        Self::new(name, NOT_RUN.to_owned(), 0.0, "")
    }

    pub(super) fn has_ended(&self) -> bool {
        self.outcome != NOT_RUN && self.outcome != BEGUN
    }

    /// Whether something is wrong, or may be.
    pub(super) fn is_bad(&self) -> bool {
        self.outcome.starts_with("failed") || self.outcome.starts_with("stopped")
    }

    fn json(&self) -> Value {
        let Self { name, outcome, seconds, output } = self;
        json!({ "name": name, "outcome": outcome, "seconds": seconds, "output": output })
    }

    fn from_json(step: &Value) -> Option<Self> {
        let text = |name: &str| step[name].as_str();
        let (outcome, seconds) = (text("outcome")?.to_owned(), step["seconds"].as_f64()?);
        Some(Self::new(text("name")?, outcome, seconds, text("output")?))
    }
}

impl RunSubject {
    /// Why plans of the folder are not for this GPU, and what to do; none where they are, or where
    /// the folder does not say for which it was made.
    pub(super) fn mismatch(&self) -> Option<String> {
        let packed = self.pack["device"].as_str()?;
        let name = self.device.split(',').next().unwrap_or_default().trim();
        let kind = known::find_kind(name);
        if kind == Some(packed) {
            return None;
        }
        let what = match kind {
            Some(kind) => format!("`cargo xtask gpu pack --device {kind}`"),
            None => {
                "a folder for this GPU, whose limits `Limits::named` would have to know".to_owned()
            }
        };
        Some(format!(
            "the folder's plans are of {packed}, and this GPU is {name}: measure \
             with {what}; steps without plans run"
        ))
    }

    /// Beginning of the report's file names; it differs between two GPUs.
    fn stem(&self) -> String {
        let name = self.device.split(',').next().unwrap_or("gpu").trim().to_lowercase();
        let letter = |c: char| if c.is_alphanumeric() { c } else { '-' };
        let name: String = name.chars().map(letter).collect();
        format!("{name}-{}", self.date)
    }

    /// Where a step writes a file of figures.
    pub(super) fn figures(&self, out: &Path, file: &str) -> PathBuf {
        out.join(format!("{}-{file}", self.stem()))
    }
}

/// Renames a file to a name that is free, so that nothing of it is lost or taken for another run's.
fn put_aside(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let names = (1..).map(|number| path.with_file_name(format!("{name}.before-{number}")));
    let Some(free) = names.into_iter().find(|name| !name.exists()) else { return Ok(()) };
    Ok(fs::rename(path, free)?)
}

impl KeptReport {
    /// The report of these steps in the folder `out`, with what an earlier run left there of the
    /// same GPU, day and pack. One of another pack or driver is put aside.
    pub(super) fn open(out: &Path, of: RunSubject, names: &[&str]) -> Result<Self> {
        fs::create_dir_all(out).with_context(|| format!("create {}", out.display()))?;
        let steps = names.iter().map(|name| StepOutcome::not_run(name)).collect();
        let [bench, shapes, daemon_stores] = [const { Value::Null }; 3];
        let mut kept = Self { of, steps, bench, shapes, daemon_stores, out: out.to_owned() };
        let earlier = fs::read(kept.path("json")).ok();
        let earlier: Value =
            earlier.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        let RunSubject { device, date, pack } = &kept.of;
        if [&earlier["device"], &earlier["date"]] != [device, date] || earlier["pack"] != *pack {
            kept.put_aside()?;
            return Ok(kept);
        }
        for step in
            earlier["steps"].as_array().into_iter().flatten().filter_map(StepOutcome::from_json)
        {
            if let Some(own) = kept.steps.iter_mut().find(|own| own.name == step.name) {
                *own = step;
            }
        }
        kept.bench = earlier["benchmark"].clone();
        kept.shapes = earlier["shapes"].clone();
        kept.daemon_stores = earlier["daemon_stores"].clone();
        // A run that was ended while it measured did not come to put them into the report.
        kept.read_figures();
        Ok(kept)
    }

    /// Puts aside what another run left.
    fn put_aside(&self) -> Result<()> {
        ["json", "md", "log"].iter().try_for_each(|end| put_aside(&self.path(end)))?;
        let figures = [FIGURES, SHAPES, DAEMON_STORES];
        figures.iter().try_for_each(|file| put_aside(&self.of.figures(&self.out, file)))
    }

    /// The values that steps write, by file.
    fn figures(&mut self) -> [(&'static str, &mut Value); 3] {
        [
            (FIGURES, &mut self.bench),
            (SHAPES, &mut self.shapes),
            (DAEMON_STORES, &mut self.daemon_stores),
        ]
    }

    /// Takes what steps have written so far.
    pub(super) fn read_figures(&mut self) {
        let (of, out) = (self.of.clone(), self.out.clone());
        for (file, figures) in self.figures() {
            let bytes = fs::read(of.figures(&out, file)).ok();
            if let Some(found) = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
                *figures = found;
            }
        }
    }

    /// Forgets what a step has written: it begins anew, and the file is put aside.
    pub(super) fn forget(&mut self, file: &str) -> Result<()> {
        for (name, figures) in self.figures() {
            if name == file {
                *figures = Value::Null;
            }
        }
        put_aside(&self.of.figures(&self.out, file))
    }

    /// A file of the report, by its end.
    pub(super) fn path(&self, end: &str) -> PathBuf {
        self.out.join(format!("{}.{end}", self.of.stem()))
    }

    /// Writes both files, each beside and then in place of what was there.
    pub(super) fn save(&self) -> Result<()> {
        let RunSubject { device, date, pack } = &self.of;
        let steps: Vec<Value> = self.steps.iter().map(StepOutcome::json).collect();
        let all = json!({ "device": device, "date": date, "pack": pack, "steps": steps,
                          "benchmark": self.bench, "shapes": self.shapes,
                          "daemon_stores": self.daemon_stores });
        let json = serde_json::to_string_pretty(&all)? + "\n";
        for (end, text) in [("json", json), ("md", write::markdown(self))] {
            let path = self.path(end);
            let beside = path.with_extension(format!("{end}.new"));
            fs::write(&beside, text).with_context(|| format!("write {}", beside.display()))?;
            fs::rename(&beside, &path)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(pack: &str) -> RunSubject {
        let (device, date) = ("Test GPU, 580.1".to_owned(), "2026-11-24".to_owned());
        RunSubject { device, date, pack: json!(pack) }
    }

    #[test]
    fn a_report_goes_on_with_an_earlier_one_and_names_what_was_not_run() {
        let folder = tempfile::tempdir().unwrap();
        let open = |names: &[&str]| KeptReport::open(folder.path(), subject("a"), names).unwrap();
        let mut first = open(&["one", "two", "three"]);
        first.steps[0] = StepOutcome::new("one", "passed".to_owned(), 2.5, &"ü".repeat(TAIL_BYTES));
        first.steps[1] = StepOutcome::begun("two");
        first.bench = json!({ "group": 4 });
        first.save().unwrap();
        let second = open(&["three", "one", "two", "new"]);
        let outcomes: Vec<_> = second.steps.iter().map(|step| step.outcome.as_str()).collect();
        assert_eq!(outcomes, [NOT_RUN, "passed", BEGUN, NOT_RUN]);
        assert_eq!(second.steps[1], first.steps[0]);
        assert_eq!(second.bench, json!({ "group": 4 }));
        assert!(second.steps.iter().map(StepOutcome::has_ended).eq([false, true, false, false]));
        // Left by a benchmark whose run was ended.
        let figures = subject("a").figures(folder.path(), FIGURES);
        fs::write(&figures, "{\"group\": 8}").unwrap();
        let mut third = open(&["one"]);
        assert_eq!(third.bench, json!({ "group": 8 }));
        third.forget(DAEMON_STORES).unwrap();
        assert_eq!(third.bench, json!({ "group": 8 }));
        let names = fs::read_dir(folder.path()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        let of = ["-figures.json", ".json", ".md"].map(|end| format!("test-gpu-2026-11-24{end}"));
        assert_eq!(names, of, "nothing half-written stays");
    }

    #[test]
    fn a_report_of_another_pack_is_put_aside() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = KeptReport::open(folder.path(), subject("a"), &["one"]).unwrap();
        first.steps[0].outcome = "passed".to_owned();
        first.save().unwrap();
        let figures = subject("a").figures(folder.path(), FIGURES);
        fs::write(figures, "{\"group\": 8}").unwrap();
        let second = KeptReport::open(folder.path(), subject("b"), &["one"]).unwrap();
        assert_eq!((second.steps[0].outcome.as_str(), &second.bench), (NOT_RUN, &Value::Null));
        for name in [".json.before-1", "-figures.json.before-1"] {
            let name = format!("test-gpu-2026-11-24{name}");
            assert!(folder.path().join(&name).exists(), "{name}");
        }
        second.save().unwrap();
        KeptReport::open(folder.path(), subject("c"), &["one"]).unwrap();
        for number in 1..=2 {
            let name = format!("test-gpu-2026-11-24.json.before-{number}");
            assert!(folder.path().join(&name).exists(), "{name}");
        }
    }

    #[test]
    fn figures_of_another_gpu_are_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let other = RunSubject { device: "Other GPU, 580.1".to_owned(), ..subject("a") };
        let open = |of: &RunSubject| KeptReport::open(folder.path(), of.clone(), &["one"]).unwrap();
        for (of, group) in [(&subject("a"), 4), (&other, 8)] {
            open(of).save().unwrap();
            fs::write(of.figures(folder.path(), FIGURES), format!("{{\"group\": {group}}}"))
                .unwrap();
        }
        assert_eq!(open(&subject("a")).bench, json!({ "group": 4 }));
        // Figures that are measured again are not lost before there are others.
        let mut again = open(&other);
        again.forget(FIGURES).unwrap();
        assert!(folder.path().join("other-gpu-2026-11-24-figures.json.before-1").exists());
    }
}
