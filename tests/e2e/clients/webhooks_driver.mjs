// Checks signatures with the library that Standard Webhooks publishes for JavaScript; gives the body that was signed.

import { answerLines, load } from "./lines.mjs";

const { Webhook } = load("standardwebhooks");

const answer = ({ key, args: { body, headers } }) => new Webhook(key).verify(body, headers);
const explain = (error) => ({ name: error.constructor.name, status: null, message: error.message, data: null });

await answerLines(answer, explain);
