// BullMQ's answer to `bench.py --only repeat`: so many job schedulers, each every second, for so many seconds.
// Arguments: port of Redis, schedulers, seconds. Prints one line of JSON: runs made, how late each began, CPU of this process.
'use strict';
const { Queue, Worker } = require(require.resolve('bullmq', { paths: [process.cwd()] }));

const [port, count, seconds] = process.argv.slice(2).map(Number);
const connection = { host: '127.0.0.1', port, maxRetriesPerRequest: null };
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function main() {
  const queue = new Queue('repeat', { connection, defaultJobOptions: { removeOnComplete: true, removeOnFail: true } });
  await queue.waitUntilReady();
  for (let first = 0; first < count; first += 50) {
    const some = Array.from({ length: Math.min(50, count - first) }, (_, number) => `every ${first + number}`);
    await Promise.all(some.map((name) => queue.upsertJobScheduler(name, { every: 1000 }, { name: 'tick' })));
  }
  const late = [];
  let measuring = false;
  const worker = new Worker('repeat', async (job) => {
    if (measuring) late.push(Date.now() - (job.opts.prevMillis || job.timestamp + (job.opts.delay || 0)));
  }, { connection, concurrency: 50 });
  await worker.waitUntilReady();
  await pause(3000);
  measuring = true;
  const began = process.hrtime.bigint();
  const cpu = process.cpuUsage();
  console.log('measuring');
  await pause(seconds * 1000);
  measuring = false;
  const used = process.cpuUsage(cpu);
  const tookUs = Number(process.hrtime.bigint() - began) / 1000;
  console.log(JSON.stringify({ late, cpu: (used.user + used.system) / tookUs }));
  process.exit(0);
}

main();
