// Drives @novu/node, Novu's first SDK for JavaScript: the call's path in the client, and its arguments in order.

import { answerLines, load } from "./lines.mjs";

const { Novu } = load("@novu/node");
const [backendUrl] = process.argv.slice(2);

async function answer({ call, args, key }) {
  const [group, name] = call.split(".");
  const { status, data } = await new Novu(key, { backendUrl })[group][name](...args);
  return { status, ...data };
}

const explain = (error) => ({
  name: error.name,
  status: error.response?.status ?? null,
  message: error.message,
  data: error.response?.data ?? null,
});

await answerLines(answer, explain);
