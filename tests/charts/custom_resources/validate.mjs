// Reads a JSON list of custom resources on standard input; prints a JSON list of what is wrong with them.
import { readFileSync } from 'node:fs';

const packages = {
  'cert-manager.io': '@kubernetes-models/cert-manager',
  'keda.sh': '@kubernetes-models/keda',
  'monitoring.coreos.com': '@kubernetes-models/prometheus-operator',
};

async function wrong(document) {
  const [group, version] = document.apiVersion.split('/');
  const models = await import(`${packages[group]}/${group}/${version}`);
  try {
    new models[document.kind](document).validate();
  } catch (error) {
    return `${document.kind}/${document.metadata.name}: ${error.message}`;
  }
  return undefined;
}

const documents = JSON.parse(readFileSync(0, 'utf8'));
const lines = await Promise.all(documents.map(wrong));
console.log(JSON.stringify(lines.filter((line) => line !== undefined)));
