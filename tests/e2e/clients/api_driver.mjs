// Drives @novu/api: each call by its usual name, with named arguments; `body` is the request's body in the SDK's words.

import { answerLines, load } from "./lines.mjs";

const { Novu } = load("@novu/api");
const [serverURL] = process.argv.slice(2);

// Its default would repeat a 409 for an hour.
const client = (secretKey) => new Novu({ secretKey, serverURL, retryConfig: { strategy: "none" } });

const calls = {
  "trigger": (novu, { body, idempotencyKey }) => novu.trigger(body, idempotencyKey),
  "triggerBulk": (novu, { body }) => novu.triggerBulk(body),
  "triggerBroadcast": (novu, { body }) => novu.triggerBroadcast(body),
  "cancel": (novu, { transactionId }) => novu.cancel(transactionId),
  "subscribers.create": (novu, { body, failIfExists }) => novu.subscribers.create(body, failIfExists),
  "subscribers.createBulk": (novu, { body }) => novu.subscribers.createBulk(body),
  "subscribers.retrieve": (novu, { subscriberId }) => novu.subscribers.retrieve(subscriberId),
  "subscribers.patch": (novu, { subscriberId, body }) => novu.subscribers.patch(body, subscriberId),
  "subscribers.delete": (novu, { subscriberId }) => novu.subscribers.delete(subscriberId),
  "subscribers.search": (novu, query) => novu.subscribers.search(query),
  "credentials.update": (novu, { subscriberId, body }) => novu.subscribers.credentials.update(body, subscriberId),
  "credentials.append": (novu, { subscriberId, body }) => novu.subscribers.credentials.append(body, subscriberId),
  "credentials.delete": (novu, { subscriberId, providerId }) =>
    novu.subscribers.credentials.delete(subscriberId, providerId),
  "properties.updateOnlineFlag": (novu, { subscriberId, body }) =>
    novu.subscribers.properties.updateOnlineFlag(body, subscriberId),
  "preferences.list": (novu, query) => novu.subscribers.preferences.list(query),
  "preferences.update": (novu, { subscriberId, body }) => novu.subscribers.preferences.update(body, subscriberId),
  "preferences.bulkUpdate": (novu, { subscriberId, body }) =>
    novu.subscribers.preferences.bulkUpdate(body, subscriberId),
  "topics.list": (novu, query) => novu.subscribers.topics.list(query),
  "activity.list": (novu, query) => novu.notifications.list(query),
  "activity.retrieve": (novu, { notificationId }) => novu.notifications.retrieve(notificationId),
  "messages.list": (novu, query) => novu.messages.retrieve(query),
  "messages.delete": (novu, { messageId }) => novu.messages.delete(messageId),
  "messages.deleteByTransactionId": (novu, { transactionId, channel }) =>
    novu.messages.deleteByTransactionId(transactionId, channel),
  "feed.list": (novu, query) => novu.subscribers.notifications.feed(query),
  "feed.unseenCount": (novu, query) => novu.subscribers.notifications.unseenCount(query),
  "feed.markAs": (novu, { subscriberId, body }) => novu.subscribers.messages.markAllAs(body, subscriberId),
  "feed.markAll": (novu, { subscriberId, body }) => novu.subscribers.messages.markAll(body, subscriberId),
  "feed.action": (novu, { body, ...names }) =>
    novu.subscribers.messages.updateAsSeen({ ...names, markMessageActionAsSeenDto: body }),
  "inbox.list": (novu, query) => novu.subscribers.notifications.list(query),
  "inbox.count": (novu, { subscriberId, filters }) => novu.subscribers.notifications.count(subscriberId, filters),
  "inbox.markAsRead": (novu, names) => novu.subscribers.notifications.markAsRead(names),
  "inbox.markAsUnread": (novu, names) => novu.subscribers.notifications.markAsUnread(names),
  "inbox.archive": (novu, names) => novu.subscribers.notifications.archive(names),
  "inbox.unarchive": (novu, names) => novu.subscribers.notifications.unarchive(names),
  "inbox.completeAction": (novu, names) => novu.subscribers.notifications.completeAction(names),
  "inbox.revertAction": (novu, names) => novu.subscribers.notifications.revertAction(names),
  "inbox.delete": (novu, names) => novu.subscribers.notifications.delete(names),
  "inbox.markAsSeen": (novu, { subscriberId, body }) => novu.subscribers.notifications.markAsSeen(body, subscriberId),
  "inbox.markAllAsRead": (novu, { subscriberId, body }) =>
    novu.subscribers.notifications.markAllAsRead(body, subscriberId),
  "inbox.archiveAll": (novu, { subscriberId, body }) => novu.subscribers.notifications.archiveAll(body, subscriberId),
  "inbox.archiveAllRead": (novu, { subscriberId, body }) =>
    novu.subscribers.notifications.archiveAllRead(body, subscriberId),
  "inbox.deleteAll": (novu, { subscriberId, body }) => novu.subscribers.notifications.deleteAll(body, subscriberId),
};

const answer = async ({ call, args, key }) => (await calls[call](client(key), args))?.result;

// What the SDK read out of the error is kept under data$; a failed validation of the response has its reason there too.
const explain = (error) => {
  const { request$, response$, body$, ...data } = error.data$ ?? {};
  return { name: error.name, status: error.statusCode ?? null, message: error.pretty?.() ?? error.message, data };
};

await answerLines(answer, explain);
