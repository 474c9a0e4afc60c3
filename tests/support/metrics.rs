//! The text exposition, read the way Prometheus reads it.

use std::collections::{BTreeMap, BTreeSet};

/// A page of metrics.
#[derive(Clone, Debug, Default)]
pub struct MetricsPage {
    /// Names that have a `# TYPE` line.
    pub names: BTreeSet<String>,
    /// Values by `name{labels}` as written.
    pub samples: BTreeMap<String, f64>,
}

impl MetricsPage {
    /// Reads a page.
    ///
    /// # Panics
    /// When a line is neither comment nor sample.
    #[must_use]
    pub fn parse_page(text: &str) -> Self {
        let mut page = Self::default();
        for line in text.lines().filter(|line| !line.is_empty()) {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                page.names.extend(rest.split(' ').next().map(str::to_owned));
            } else if !line.starts_with('#') {
                let (key, value) = line.rsplit_once(' ').expect("a sample");
                page.samples.insert(key.to_owned(), value.parse().expect("a number"));
            }
        }
        page
    }

    /// The sum of a metric's samples that carry all of `labels`, each as `name="value"`.
    #[must_use]
    pub fn sum_samples(&self, name: &str, labels: &[&str]) -> f64 {
        let matches = |key: &&String| {
            key.split('{').next() == Some(name) && labels.iter().all(|label| key.contains(label))
        };
        let found = self.samples.iter().filter(|(key, _)| matches(key));
        found.map(|(_, value)| value).sum()
    }
}
