/* The scheduler's rules as a plain native loop: what one core can do on this work, and the measure of the array program.
 *
 *     cc -O3 -march=native native.c -o native
 *     ./native INPUT [OUTPUT]
 *
 * Modelled: first come first served, chunked prefill, blocks, preemption by recomputation, the full-sequence check. Not
 * modelled: async scheduling, prefix caching, priorities, watermark, thresholds, statistics. Settings run one after the
 * other and every iteration is stepped; an event costs O(1), however many requests run:
 *   - a decoding request gets a token per iteration, so the iteration after its last token is known: a ring of lists;
 *   - it takes a block when its length is a multiple of the block size: a count of requests by length modulo that;
 *   - the victim of a preemption is the request admitted last: a stack;
 *   - without a prefill threshold at most one prompt is in progress, and it was admitted last.
 *
 * INPUT, in text: requests, settings, block size, full-sequence check (0 or 1), then the cost in picoseconds of an
 * iteration, a prompt token, a decode and a token of the context of decodes; per request prompt, output and arrival in
 * picoseconds, in order of arrival; per setting max_num_seqs, max_num_batched_tokens and usable blocks, enough for the
 * longest request. OUTPUT, int64 in the machine's order: per setting iterations, preemptions, and per request the times
 * of its first schedule, first token and last token. Prints the CPU seconds that the settings took.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NONE = -1 };

struct request {
    int64_t arrival, scheduled, first_token, finish; /* picoseconds, NONE before */
    int prompt, output;
    int generated; /* output tokens when it was last preempted */
    int leaves;    /* decoding: the iteration at whose start it is finished */
    int next, previous; /* in its list of the ring; `next` also in the queue of the preempted */
};

struct cost {
    int64_t step, prefill_token, decode, context;
};

struct setting {
    int seats, budget, blocks;
};

struct outcome {
    int64_t iterations, preemptions;
};

struct server {
    struct request *requests;
    int *stack; /* running requests in the order of admission; finished ones stay until they come up */
    int *ring;  /* by iteration modulo `buckets`: the first of the requests that leave then */
    int *phase; /* decoding requests by length modulo block size, counted from `due` */
    int due;    /* the place in `phase` of those that need a block in this iteration */
    int buckets, block_size, iteration;
    int top, decodes, free;
    int64_t context; /* tokens of decoding requests with KV */
};

static int blocks_of(const struct server *s, int tokens) { return (tokens + s->block_size - 1) / s->block_size; }

static int *bucket(struct server *s, int iteration) { return &s->ring[iteration & (s->buckets - 1)]; }

/* Where a request counts that has `computed` tokens in this iteration. */
static int *phase_of(struct server *s, int computed) { return &s->phase[(s->due + computed) % s->block_size]; }

static int computed_of(const struct server *s, const struct request *r) {
    return r->prompt + r->output - 1 - (r->leaves - s->iteration);
}

/* From the next iteration on the request decodes, `known` tokens being computed by then. */
static void start_decoding(struct server *s, int index, int known) {
    struct request *r = &s->requests[index];
    r->leaves = s->iteration + r->output - (known - r->prompt);
    int *head = bucket(s, r->leaves);
    r->next = *head;
    r->previous = NONE;
    if (*head != NONE) s->requests[*head].previous = index;
    *head = index;
    ++*phase_of(s, known - 1); /* `known` in the next iteration */
}

static void stop_decoding(struct server *s, struct request *r) {
    int computed = computed_of(s, r);
    s->free += blocks_of(s, computed);
    s->context -= computed;
    s->decodes--;
    --*phase_of(s, computed);
}

static void leave_ring(struct server *s, struct request *r) {
    if (r->previous == NONE) *bucket(s, r->leaves) = r->next;
    else s->requests[r->previous].next = r->next;
    if (r->next != NONE) s->requests[r->next].previous = r->previous;
}

static int smaller(int a, int b) { return a < b ? a : b; }

static struct outcome simulate(struct server *s, int count, struct setting set, struct cost cost, int full_sequence) {
    struct outcome outcome = {0, 0};
    int *fresh = malloc((size_t)count * sizeof(int)); /* requests that get their first token in this iteration */
    int64_t clock = 0;
    int arriving = 0;                /* the first request that was never scheduled */
    int preempted = NONE;            /* head of the queue of preempted requests */
    int prompt = NONE, done = 0, known = 0; /* the prompt in progress, its computed tokens, and those to compute */
    int finished = 0;

    s->iteration = s->due = s->top = s->decodes = 0;
    s->free = set.blocks;
    s->context = 0;
    memset(s->ring, 0xff, (size_t)s->buckets * sizeof(int));
    memset(s->phase, 0, (size_t)s->block_size * sizeof(int));
    for (int i = 0; i < count; i++) {
        struct request *r = &s->requests[i];
        r->scheduled = r->first_token = r->finish = NONE;
        r->generated = 0;
    }

    for (;;) {
        /* Requests whose last token came with the iteration before. */
        int *leaving = bucket(s, s->iteration);
        for (int i = *leaving; i != NONE; i = s->requests[i].next) {
            stop_decoding(s, &s->requests[i]);
            s->requests[i].finish = clock;
            finished++;
        }
        *leaving = NONE;
        if (finished == count) break;

        /* Pass 1: every decode, then the prompt in progress; the request admitted last makes room. */
        int full = 0, chunk, need;
        for (;;) {
            chunk = prompt == NONE ? 0 : smaller(known - done, set.budget - s->decodes);
            need = s->phase[s->due];
            if (chunk > 0) need += blocks_of(s, done + chunk) - blocks_of(s, done);
            if (need <= s->free) break;
            int index = s->stack[--s->top];
            struct request *victim = &s->requests[index];
            if (victim->finish != NONE) continue;
            if (index == prompt) {
                s->free += blocks_of(s, done);
                victim->generated = known - victim->prompt;
                prompt = NONE;
            } else {
                victim->generated = computed_of(s, victim) + 1 - victim->prompt;
                stop_decoding(s, victim);
                leave_ring(s, victim);
            }
            victim->next = preempted;
            preempted = index;
            outcome.preemptions++;
            full = 1;
        }
        s->free -= need;
        int decodes = s->decodes, prefill = chunk, started = 0, news = 0;
        int64_t context = s->context + decodes, joined = 0;
        if (prompt != NONE) {
            if (chunk > 0 && known - done == 1 && s->requests[prompt].generated > 0) { /* counts as a decode */
                prefill = 0;
                decodes++;
                context += known;
            }
            done += chunk;
            if (done == known) {
                start_decoding(s, prompt, known);
                if (s->requests[prompt].first_token == NONE) fresh[news++] = prompt;
                started++;
                joined += known;
                prompt = NONE;
            }
        }

        /* Pass 2: the waiting queue, preempted requests first, as long as its head fits. */
        int left = set.budget - s->decodes - chunk;
        while (!full && prompt == NONE && left > 0 && s->decodes + started < set.seats) {
            int index = preempted != NONE ? preempted : arriving;
            if (index == count || (preempted == NONE && s->requests[index].arrival > clock)) break;
            struct request *r = &s->requests[index];
            int tokens = r->prompt + r->generated, part = smaller(tokens, left), taken = blocks_of(s, part);
            if (taken > s->free || (full_sequence && blocks_of(s, tokens) > s->free)) break;
            if (preempted != NONE) preempted = r->next;
            else arriving++;
            if (r->scheduled == NONE) r->scheduled = clock;
            s->stack[s->top++] = index;
            s->free -= taken;
            left -= part;
            prefill += part;
            if (part == tokens) {
                start_decoding(s, index, tokens);
                if (r->first_token == NONE) fresh[news++] = index;
                started++;
                joined += tokens;
            } else {
                prompt = index;
                done = part;
                known = tokens;
            }
        }

        if (decodes + prefill == 0) { /* nothing runs: until the next arrival */
            if (preempted == NONE && s->requests[arriving].arrival > clock) clock = s->requests[arriving].arrival;
            continue;
        }
        clock += cost.step + cost.prefill_token * prefill + cost.decode * decodes + cost.context * context;
        for (int i = 0; i < news; i++) s->requests[fresh[i]].first_token = clock;
        s->context += s->decodes + joined;
        s->decodes += started;
        s->iteration++;
        s->due = s->due == 0 ? s->block_size - 1 : s->due - 1;
        outcome.iterations++;
    }
    free(fresh);
    return outcome;
}

int main(int words, char **word) {
    FILE *in = words > 1 ? fopen(word[1], "r") : NULL, *out = words > 2 ? fopen(word[2], "wb") : NULL;
    struct server s = {0};
    struct cost cost;
    int count, settings, full_sequence, longest = 0, largest = 0;
    if (!in || fscanf(in, "%d %d %d %d", &count, &settings, &s.block_size, &full_sequence) != 4) return 2;
    if (fscanf(in, "%" SCNd64 "%" SCNd64, &cost.step, &cost.prefill_token) != 2) return 2;
    if (fscanf(in, "%" SCNd64 "%" SCNd64, &cost.decode, &cost.context) != 2) return 2;
    s.requests = malloc((size_t)count * sizeof(struct request));
    s.stack = malloc((size_t)count * sizeof(int));
    for (int i = 0; i < count; i++) {
        struct request *r = &s.requests[i];
        if (fscanf(in, "%d %d %" SCNd64, &r->prompt, &r->output, &r->arrival) != 3) return 2;
        if (r->output > longest) longest = r->output;
        if (r->prompt + r->output - 1 > largest) largest = r->prompt + r->output - 1;
    }
    for (s.buckets = 1; s.buckets <= longest; s.buckets *= 2) {}
    s.ring = malloc((size_t)s.buckets * sizeof(int));
    s.phase = malloc((size_t)s.block_size * sizeof(int));
    double seconds = 0;
    for (int i = 0; i < settings; i++) {
        struct setting set;
        if (fscanf(in, "%d %d %d", &set.seats, &set.budget, &set.blocks) != 3) return 2;
        if (blocks_of(&s, largest) > set.blocks) return 3; /* it would preempt itself for ever */
        struct timespec begin, end;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
        struct outcome outcome = simulate(&s, count, set, cost, full_sequence);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
        seconds += (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
        if (!out) continue;
        fwrite(&outcome, sizeof outcome, 1, out);
        for (int k = 0; k < count; k++) fwrite(&s.requests[k].scheduled, sizeof(int64_t), 3, out);
    }
    printf("%.9f\n", seconds);
    return out && fclose(out) != 0;
}
