//! The row of the store that daemons share.

use super::{DashboardPanel, lines};
use crate::dashboard::query::{PanelQuery, quantile_queries};
use crate::metrics::Metric::{
    RemoteFoundBlocksTotal, RemoteRequestsTotal, RemoteSeconds, RemoteState,
};

pub(super) fn remote_panels() -> Vec<DashboardPanel> {
    let instance = &["instance"];
    let by_result = &["instance", "op", "result"];
    vec![
        lines("Breaker", "none", [PanelQuery::level(RemoteState, instance)]).explained(RemoteState),
        lines("Requests", "reqps", [PanelQuery::rate(RemoteRequestsTotal, by_result)])
            .explained(RemoteRequestsTotal),
        lines("Time of a request", "s", quantile_queries(RemoteSeconds, &["instance", "op"], ""))
            .explained(RemoteSeconds),
        lines("Blocks found", "ops", [PanelQuery::rate(RemoteFoundBlocksTotal, instance)])
            .explained(RemoteFoundBlocksTotal),
    ]
}
