//! Row of doors: who was not let in, and whether files were read anew.

use super::{DashboardPanel, lines};
use crate::dashboard::query::PanelQuery;
use crate::metrics::Metric;

pub(super) fn door_panels() -> Vec<DashboardPanel> {
    use Metric::{AccessRefusalsTotal, FileReloadsTotal, Insecure};
    let refusals = PanelQuery::rate(AccessRefusalsTotal, &["instance", "reason"]);
    let reloads = PanelQuery::rate(FileReloadsTotal, &["instance", "files", "result"]);
    vec![
        lines("Calls not let in", "ops", [refusals]).explained(AccessRefusalsTotal),
        lines("Files read anew", "ops", [reloads]).explained(FileReloadsTotal),
        lines("Open to a network", "none", [PanelQuery::level(Insecure, &["instance"])])
            .explained(Insecure),
    ]
}
