//! Row of doors: who was not let in, whether files were read anew, and quotas of namespaces.

use super::{DashboardPanel, lines};
use crate::dashboard::query::{PanelQuery, selector};
use crate::metrics::Metric;

pub(super) fn door_panels() -> Vec<DashboardPanel> {
    use Metric::{AccessRefusalsTotal, FileReloadsTotal, Insecure};
    use Metric::{NamespaceWeight, QuotaAllowed, QuotaRefusalsTotal, QuotaUsed};
    let by = ["instance", "namespace", "quota"];
    let part = format!("{} / {}", selector(QuotaUsed), selector(QuotaAllowed));
    let part = PanelQuery::new(part, "{{instance}} {{namespace}} {{quota}}");
    let over = PanelQuery::rate(QuotaRefusalsTotal, &by);
    let refusals = PanelQuery::rate(AccessRefusalsTotal, &["instance", "reason"]);
    let reloads = PanelQuery::rate(FileReloadsTotal, &["instance", "files", "result"]);
    let weights = PanelQuery::level(NamespaceWeight, &["instance", "namespace"]);
    vec![
        lines("Calls not let in", "ops", [refusals]).explained(AccessRefusalsTotal),
        lines("Files read anew", "ops", [reloads]).explained(FileReloadsTotal),
        lines("Open to a network", "none", [PanelQuery::level(Insecure, &["instance"])])
            .explained(Insecure),
        lines("Quotas used", "percentunit", [part]).explained(QuotaUsed),
        lines("Refused by quotas", "ops", [over]).explained(QuotaRefusalsTotal),
        lines("Weights", "none", [weights]).explained(NamespaceWeight),
    ]
}
