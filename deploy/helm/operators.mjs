// Holds manifests for operators (a JSON list, which check.py writes) against the schemas of their kinds.
// Packages: @kubernetes-models/prometheus-operator, @kubernetes-models/cert-manager.
import fs from "node:fs";
import { Certificate } from "@kubernetes-models/cert-manager/cert-manager.io/v1/Certificate";
import { PodMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor";

const kinds = { Certificate, PodMonitor };
const manifests = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
if (manifests.length === 0) throw new Error("there are none");
for (const manifest of manifests) {
  new kinds[manifest.kind](manifest).validate();
}
console.log(`chart: ${manifests.length} manifests for operators are valid`);
