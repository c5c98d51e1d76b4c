// The line protocol of the clients: a line comes in with {call, args, key}, and one goes out with {result} or {error}.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

// The SDKs are installed apart from the checkout, in the folder that this is started in.
export const load = createRequire(`${process.cwd()}/`);

export async function answerLines(answer, explain) {
  for await (const line of createInterface({ input: process.stdin })) {
    let said;
    try {
      said = { result: (await answer(JSON.parse(line))) ?? null };
    } catch (error) {
      said = { error: explain(error) };
    }
    process.stdout.write(`${JSON.stringify(said)}\n`);
  }
}
