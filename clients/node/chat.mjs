// Streams the answer to one question: node chat.mjs ADDRESS QUESTION. Ctrl-C cancels the call on the server.
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const [address, question] = process.argv.slice(2);
if (question === undefined) {
  console.error('usage: node chat.mjs ADDRESS QUESTION');
  process.exit(2);
}

const protos = fileURLToPath(new URL('../../proto', import.meta.url));
const definition = await protoLoader.load('triptych/inference/v1/inference.proto', {
  includeDirs: [protos],
  longs: String, // seeds have 64 bits, a number holds 53
});
const { inference } = grpc.loadPackageDefinition(definition).triptych;
const client = new inference.v1.InferenceService(address, grpc.credentials.createInsecure());

const call = client.chat({
  messages: [{ role: 'ROLE_USER', content: [{ text: question }] }],
  options: { maxTokens: 128, sampling: { temperature: 0 } },
});
process.on('SIGINT', () => call.cancel());
call.on('data', (message) => {
  for (const choice of message.choices ?? []) process.stdout.write(choice.text ?? '');
  if (message.usage) {
    const { promptTokens, completionTokens } = message.usage;
    process.stdout.write(`\n[${promptTokens} + ${completionTokens} tokens]\n`);
  }
});
call.on('error', (error) => {
  console.error(`chat: ${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
  client.close();
});
call.on('end', () => client.close());
