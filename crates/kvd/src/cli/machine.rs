//! How busy this machine is: a figure of a busy one says less.

/// Load of the last minute, and what it means for figures.
pub(super) fn load_text(cores: usize) -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = text.split(' ').next().and_then(|load| load.parse::<f64>().ok());
    describe_load(load, cores)
}

fn describe_load(load: Option<f64>, cores: usize) -> String {
    match load {
        None => "how busy the machine is, is not known".to_owned(),
        Some(load) if load > 0.5 * cores as f64 => format!(
            "the machine is busy (load {load:.1} on {cores} cores): figures are processor time, \
             but caches, memory and clocks are shared with what else runs"
        ),
        Some(load) => format!("load {load:.1} on {cores} cores"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_is_said_to_be() {
        assert!(describe_load(Some(3.0), 2).contains("busy (load 3.0 on 2 cores)"));
        assert_eq!(describe_load(Some(0.2), 2), "load 0.2 on 2 cores");
        assert!(describe_load(None, 2).contains("not known"));
        assert!(!load_text(2).is_empty());
    }
}
