//! The Grafana dashboard, made from the names in [`Metric`] so that it cannot drift from them.
//!
//! `kvd dashboard` prints it and `deploy/grafana/kvd.json` is that print. [`panels`] says what is
//! shown; this file says how Grafana wants it written down.

mod panels;
mod query;
#[cfg(test)]
mod tests;
mod threshold;

use panels::{DashboardPanel, PanelRow};
use query::PanelQuery;
use serde_json::{Value, json};

/// Grafana's grid is this many units wide.
const GRID_WIDTH: u32 = 24;
/// Height of a row's title.
const ROW_HEIGHT: u32 = 1;

/// The dashboard as one JSON object, to be imported into Grafana or provisioned from a file.
#[must_use]
pub fn dashboard_json() -> Value {
    json!({
        "uid": "kvd",
        "title": "kvd",
        "description": "KV-cache memory: what it holds, what it saves, how fast it answers.",
        "tags": ["kvd"],
        "schemaVersion": 39,
        "editable": true,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": { "from": "now-30m", "to": "now" },
        "timezone": "browser",
        "annotations": { "list": [] },
        "templating": { "list": list_variables() },
        "panels": lay_out_grid(&panels::all_rows()),
    })
}

/// The text of the dashboard's file.
///
/// # Panics
/// Never: every key is a text.
#[must_use]
pub fn dashboard_text() -> String {
    let mut text = serde_json::to_string_pretty(&dashboard_json()).expect("keys are texts");
    text.push('\n');
    text
}

/// Choices of the viewer at the top: the data source, daemons, namespaces and models.
fn list_variables() -> Vec<Value> {
    let mut variables = vec![json!({
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    })];
    for variable in query::VARIABLES {
        let query = format!("label_values({}, {})", variable.of.name(), variable.name);
        variables.push(json!({
            "name": variable.name,
            "label": variable.title,
            "type": "query",
            "datasource": datasource_ref(),
            "query": { "query": query, "refId": variable.name },
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": true,
            "includeAll": true,
            "allValue": ".*",
            "current": { "text": "All", "value": "$__all" },
        }));
    }
    variables
}

fn datasource_ref() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}

/// Lays rows out one below the other, and panels from left to right with line breaks.
fn lay_out_grid(rows: &[PanelRow]) -> Vec<Value> {
    let mut out = Vec::new();
    let mut y = 0;
    for row in rows {
        out.push(json!({
            "id": out.len() + 1,
            "type": "row",
            "title": row.title,
            "collapsed": false,
            "panels": [],
            "gridPos": { "x": 0, "y": y, "w": GRID_WIDTH, "h": ROW_HEIGHT },
        }));
        y += ROW_HEIGHT;
        let mut x = 0;
        for panel in &row.panels {
            if x + panel.width > GRID_WIDTH {
                x = 0;
                y += row.height;
            }
            let at = json!({ "x": x, "y": y, "w": panel.width, "h": row.height });
            out.push(render_panel(panel, out.len() + 1, at));
            x += panel.width;
        }
        y += row.height;
    }
    out
}

fn render_panel(panel: &DashboardPanel, id: usize, grid_pos: Value) -> Value {
    let targets: Vec<_> =
        panel.queries.iter().enumerate().map(|(i, q)| query_target(q, i)).collect();
    let mut defaults = json!({ "unit": panel.unit });
    if let Some(max) = panel.max {
        defaults["min"] = json!(0);
        defaults["max"] = json!(max);
    }
    if !panel.thresholds.is_empty() {
        let steps = panel.thresholds.iter().map(|step| step.to_json());
        defaults["thresholds"] = json!({ "mode": "absolute", "steps": steps.collect::<Vec<_>>() });
        defaults["color"] = json!({ "mode": "thresholds" });
    }
    if !panel.values.is_empty() {
        let options: serde_json::Map<_, _> = panel
            .values
            .iter()
            .map(|(value, text)| ((*value).to_owned(), json!({ "text": text })))
            .collect();
        defaults["mappings"] = json!([{ "type": "value", "options": options }]);
    }
    json!({
        "id": id,
        "type": panel.kind.type_name(),
        "title": panel.title,
        "description": panel.description,
        "datasource": datasource_ref(),
        "gridPos": grid_pos,
        "fieldConfig": { "defaults": defaults, "overrides": [] },
        "options": panel.kind.panel_options(),
        "targets": targets,
    })
}

fn query_target(query: &PanelQuery, index: usize) -> Value {
    let letter = char::from(b'A' + u8::try_from(index).expect("few queries per panel"));
    json!({
        "refId": letter.to_string(),
        "datasource": datasource_ref(),
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": true,
    })
}
