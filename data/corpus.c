#include "data/corpus.h"

#include "data/files.h"
#include "data/shards.h"
#include "data/tokenizer.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

// ---- the words ----

static const char *const names[] = {"Tom|he|He|his|him",
                                    "Ben|he|He|his|him",
                                    "Max|he|He|his|him",
                                    "Sam|he|He|his|him",
                                    "Leo|he|He|his|him",
                                    "Finn|he|He|his|him",
                                    "Jack|he|He|his|him",
                                    "Hugo|he|He|his|him",
                                    "Otto|he|He|his|him",
                                    "Paul|he|He|his|him",
                                    "Nick|he|He|his|him",
                                    "Dan|he|He|his|him",
                                    "Mia|she|She|her|her",
                                    "Lily|she|She|her|her",
                                    "Anna|she|She|her|her",
                                    "Rose|she|She|her|her",
                                    "Zoe|she|She|her|her",
                                    "Ella|she|She|her|her",
                                    "Kate|she|She|her|her",
                                    "Ruby|she|She|her|her",
                                    "Nora|she|She|her|her",
                                    "Ivy|she|She|her|her",
                                    "Clara|she|She|her|her",
                                    "Ada|she|She|her|her",
                                    NULL};

static const char *const animals[] = {"fox|warm den|grapes",
                                      "bear|dark cave|honey",
                                      "mouse|tiny hole|cheese",
                                      "rabbit|deep burrow|carrots",
                                      "frog|green pond|flies",
                                      "duck|nest of reeds|bread",
                                      "cat|soft basket|fish",
                                      "dog|wooden kennel|bones",
                                      "horse|big stable|apples",
                                      "pig|muddy sty|corn",
                                      "goat|red barn|leaves",
                                      "mole|long tunnel|worms",
                                      "squirrel|hollow oak|nuts",
                                      "hedgehog|heap of leaves|berries",
                                      "beaver|lodge|bark",
                                      "turtle|quiet bay|seaweed",
                                      "monkey|palm tree|bananas",
                                      "panda|thicket|bamboo",
                                      "penguin|house of ice|shrimps",
                                      "camel|striped tent|dates",
                                      NULL};

static const char *const places[] = {
    "forest", "river", "market", "garden", "mountain", "village", "castle",    "beach", "bridge",
    "farm",   "lake",  "meadow", "valley", "harbour",  "mill",    "old tower", NULL};

static const char *const traits[] = {"brave",  "kind",     "clever", "lazy",  "shy",     "proud",
                                     "gentle", "cheerful", "hungry", "quiet", "tiny",    "silly",
                                     "polite", "sleepy",   "grumpy", "lucky", "patient", "friendly",
                                     "young",  "merry",    NULL};

static const char *const looks[] = {
    "small",     "huge",   "round",   "dusty",   "shiny", "broken", "strange", "pretty", "wet",
    "heavy",     "plain",  "crooked", "bright",  "dirty", "narrow", "tall",    "rusty",  "famous",
    "crumbling", "lonely", "mossy",   "painted", "wide",  "sticky", NULL};

static const struct grammar_slot slots[] = {
    {"hero", "name|he|He|his|him", names, NULL},
    {"friend", "name|he|He|his|him", names, "hero"},
    {"animal", "kind|home|food", animals, NULL},
    {"friend_animal", "kind|home|food", animals, "animal"},
    {"trait", "word", traits, NULL},
    {"friend_trait", "word", traits, "trait"},
    {"colour", "word",
     LIST("red", "blue", "green", "yellow", "white", "black", "golden", "silver", "pink", "brown",
          "purple", "grey", "orange-red", "striped", "spotted", "clear"),
     NULL},
    {"thing", "noun|joy",
     LIST("kite|flew it over the hill", "drum|played it loud and fast", "boat|sailed it on the sea",
          "lamp|lit it every night", "ball|rolled it down the hill", "bell|rang it from the roof",
          "book|read it by the fire", "hat|wore it in the sun", "cup|drank warm milk from it",
          "flag|waved it at the birds", "rope|jumped over it all day", "cart|pulled it to town",
          "flute|played a sweet song on it", "box|kept little stones in it",
          "blanket|slept under it", "pen|wrote long letters with it"),
     NULL},
    {"place", "word", places, NULL},
    {"where_next", "word", places, "place"},
    {"look", "word", looks, NULL},
    {"manners", "word", traits, NULL},
    {"volume", "word", LIST("loud", "soft", "strange", "long", "sudden", "sad"), NULL},
    {"when", "word",
     LIST("morning", "evening", "day in spring", "day in autumn", "winter night", "summer day",
          "Monday", "Sunday", "rainy night", "holiday", "birthday", "cold noon"),
     NULL},
    {"family", "word",
     LIST("mother", "father", "brothers", "sisters", "uncle", "aunt", "grandmother", "cousins"),
     NULL},
    {"weather", "sort|effect",
     LIST("rainy|water dripped from every leaf", "windy|the trees bent low",
          "snowy|the path was white", "foggy|nobody could see far", "sunny|the air was warm",
          "stormy|thunder rolled over the hills", "frosty|the puddles were ice",
          "hot|the stones were warm"),
     NULL},
    {"shelter", "word",
     LIST("leaf", "tree", "bridge", "wagon", "bush", "rock", "roof", "umbrella", "bench", "log"),
     NULL},
    {"barrier", "noun|crossed",
     LIST("river|swam across", "wall|climbed over it", "tunnel|crept through it",
          "hedge|found a gap", "hill|walked up step by step", "swamp|hopped from stone to stone",
          "gate|squeezed under it", "log|crawled below it", "ditch|jumped over it",
          "snowdrift|dug a way through"),
     NULL},
    {"guide", "noun|spot",
     LIST("owl|in a tree", "snail|on a stone", "robin|on a fence", "beetle|beside the path",
          "crow|on a post", "lizard|on a wall", "deer|among the ferns", "donkey|at a gate",
          "swan|on the water", "bat|under a roof", "spider|in a web", "hen|behind a shed"),
     NULL},
    {"spot", "word",
     LIST("under a stone", "behind the barn", "in a hollow tree", "below the stairs",
          "inside a barrel", "between two rocks", "on top of a shelf", "near the well",
          "at the end of the lane", "over the hedge", "among the flowers", "beside the road"),
     NULL},
    {"junk", "word",
     LIST("nail", "shoe", "feather", "spoon", "button", "bone", "bottle", "key", "wheel", "glove",
          "coin", "shell", "string", "potato"),
     NULL},
    {"count", "word",
     LIST("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve"), NULL},
    {"taste", "word", LIST("sweet", "fresh", "tasty", "cold", "warm", "crunchy", "salty", "fine"),
     NULL},
    {"noise", "sound|source",
     LIST("splash|a fish in the pond", "cry|a lamb behind the fence", "tapping|a bird at work",
          "howl|the wind in the rocks", "rumble|a cart on the road", "tune|a boy with a pipe",
          "crack|a branch that fell", "whisper|the grass in the wind", "ring|the bell of a church",
          "snore|a giant in his bed"),
     NULL},
    {"move", "word",
     LIST("walked", "ran", "marched", "hopped", "hurried", "crept", "strolled", "wandered",
          "trotted", "danced"),
     NULL},
    {"manner", "word",
     LIST("slowly", "quickly", "quietly", "happily", "bravely", "carefully", "alone", "gladly",
          "sadly", "for hours"),
     NULL},
    {"mood", "word",
     LIST("glad", "happy", "proud", "pleased", "excited", "thankful", "delighted", "merry"), NULL},
    {"cheer", "word",
     LIST("danced", "laughed", "sang", "clapped", "jumped", "cried", "whistled", "smiled"), NULL},
    {"lost", "word",
     LIST("ring", "key", "hat", "shoe", "basket", "purse", "map", "ladder", "blanket", "tooth"),
     NULL},
    {NULL, NULL, NULL, NULL},
};

// ---- the plot ----

static const struct grammar_rule rules[] = {
    {"story", LIST("<opening><wish><start><event><more>\n")},
    {"opening",
     LIST("Once upon a time there was a {trait.word} {animal.kind} named {hero.name}. [hero.He] "
          "lived in a [animal.home]. ",
          "{hero.name} was a {trait.word} {animal.kind} who lived in a [animal.home]. ",
          "Long ago, a {trait.word} {animal.kind} called {hero.name} lived in a [animal.home]. ",
          "Far away, in a {animal.home}, lived a {trait.word} [animal.kind]. The name of the "
          "[animal.kind] was {hero.name}. ",
          "This is the story of {hero.name}, a {trait.word} {animal.kind}. ")},
    {"wish",
     LIST("More than anything, [hero.name] wanted a {colour.word} {thing.noun}. ",
          "[hero.He] dreamed of a {colour.word} {thing.noun}. ",
          "Every day [hero.he] wished for a {colour.word} {thing.noun}. ",
          "The kitchen was full of [animal.food], but [hero.he] only wanted a {colour.word} "
          "{thing.noun}. ")},
    {"start",
     LIST(
         "One {when.word}, [hero.he] set out for the {place.word}. ",
         "So [hero.he] packed some {taste.word} [animal.food] and {move.word} to the "
         "{place.word}. ",
         "At last [hero.he] said goodbye to [hero.his] {family.word} and {move.word} {manner.word} "
         "to the {place.word}. ")},
    {"more", LIST("<event><more_yet>", "<finish>")},
    {"more_yet", LIST("<event><finish>", "<finish>")},
    {"event",
     LIST(
         "It was a {weather.sort} day and [weather.effect]. [hero.name] waited under a {look.word} "
         "{shelter.word}. ",
         "A {look.word} {barrier.noun} blocked the way, but [hero.name] [barrier.crossed]. ",
         "There [hero.he] met a {manners.word} {guide.noun} [guide.spot]. \"Have you seen a "
         "[colour.word] [thing.noun]?\" asked [hero.name]. <answer>",
         "[hero.He] looked {spot.word}, but there was only a {look.word} {junk.word}. ",
         "Soon [hero.he] was hungry and ate {count.word} plates of {taste.word} [animal.food]. ",
         "Then [hero.he] heard a {volume.word} {noise.sound}. It was only [noise.source]. ",
         "When night came, the [trait.word] [animal.kind] slept under a {look.word} {shelter.word} "
         "and dreamed of the [thing.noun]. ",
         "\"I must find it,\" said [hero.name], and {move.word} on {manner.word}. ",
         "For {count.word} days [hero.he] {move.word} {manner.word} from the [place.word] to the "
         "{where_next.word}. ")},
    {"answer", LIST("\"No,\" said the [guide.noun], \"but look in the {where_next.word}.\" ",
                    "\"Yes,\" said the [guide.noun], \"it was in the {where_next.word}.\" ",
                    "The [guide.noun] {move.word} away {manner.word}. ",
                    "\"Take this {look.word} {junk.word} instead,\" said the [guide.noun]. ")},
    {"finish", LIST("<meeting><gift><end>")},
    {"meeting",
     LIST("At the {where_next.word} [hero.he] met {friend.name}, a {friend_trait.word} "
          "{friend_animal.kind}. ",
          "On the way home [hero.he] met a {friend_trait.word} {friend_animal.kind} named "
          "{friend.name}. ",
          "Just then a {friend_trait.word} {friend_animal.kind} came by. \"I am {friend.name},\" "
          "[friend.he] said. ")},
    {"gift",
     LIST("[friend.name] had a [colour.word] [thing.noun] and gave it to [hero.him] for some "
          "{taste.word} [animal.food]. ",
          "\"Is this [colour.word] [thing.noun] yours?\" asked [friend.name]. \"It is now,\" said "
          "[hero.name]. ",
          "[friend.He] had lost a {look.word} {lost.word}. [hero.name] found it {spot.word}, and "
          "got a [colour.word] [thing.noun] for it. ",
          "Together they looked {spot.word}, and there lay a [colour.word] [thing.noun]! ",
          "In [friend.his] [friend_animal.home] there was a [colour.word] [thing.noun]. \"Take "
          "it,\" said [friend.name]. ")},
    {"end",
     LIST("[hero.name] was so {mood.word} that [hero.he] {cheer.word}. All year [hero.he] "
          "[thing.joy].",
          "That evening [hero.name] [thing.joy], and [friend.name] {cheer.word}.",
          "Then the [trait.word] [animal.kind] and the [friend_trait.word] [friend_animal.kind] "
          "shared some {taste.word} [friend_animal.food] and were friends for ever.",
          "\"Thank you,\" said [hero.name]. [hero.He] ran home and [thing.joy].")},
    {NULL, NULL},
};

const struct grammar_source corpus_source = {rules, slots};

// ---- writing ----

// A random stream of its own for every (seed, purpose).
static uint64_t stream(uint64_t seed, uint64_t purpose)
{
    uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u ^ (purpose + 1) * 0xd1b54a32d192ed03u;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
    return x ^ (x >> 32);
}

static int write_stories(struct shard_writer *out, const struct grammar *g, uint64_t tokens,
                         uint64_t random, struct error *err)
{
    size_t max = grammar_entropy(g).tokens_max;
    char *text = malloc(max);
    uint32_t *ids = malloc(max * sizeof *ids);
    int rc = STATUS_OK;
    if (!text || !ids)
        rc = error_set(err, STATUS_FAIL, "no memory for a story of %zu bytes", max);
    while (rc == STATUS_OK && shard_writer_tokens(out) < tokens) {
        size_t n = grammar_draw(g, &random, text, NULL);
        ids[0] = GRAMMAR_END;
        for (size_t i = 0; i < n; i++)
            ids[i + 1] = (unsigned char)text[i];
        rc = shard_write(out, ids, n + 1, err);
    }
    free(text);
    free(ids);
    return rc;
}

static int write_tokenizer(const char *prefix, struct error *err)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s_tokenizer.bin", prefix); // the writers checked its length
    struct tokenizer *tokenizer;
    int rc = tokenizer_bytes(&tokenizer, err);
    if (rc == STATUS_OK)
        rc = tokenizer_write(tokenizer, path, err);
    if (rc == STATUS_OK)
        tokenizer_free(tokenizer);
    return rc;
}

int corpus_write(const char *prefix, uint64_t train_tokens, uint64_t val_tokens,
                 uint64_t shard_tokens, uint64_t seed, struct error *err)
{
    char path[2][PATH_MAX];
    struct shard_writer *out[2] = {NULL, NULL};
    uint64_t tokens[2] = {train_tokens, val_tokens};
    struct grammar *g;
    int rc = grammar_open(&g, &corpus_source, err);
    if (rc != STATUS_OK)
        return rc;
    for (int i = 0; rc == STATUS_OK && i < 2; i++) {
        snprintf(path[i], sizeof path[i], "%s_%s", prefix, i == 0 ? "train" : "val");
        rc = shard_writer_open(&out[i], path[i], shard_tokens, false, err);
        if (rc == STATUS_OK)
            rc = write_stories(out[i], g, tokens[i], stream(seed, (uint64_t)i), err);
        if (rc == STATUS_OK)
            rc = shard_writer_seal(out[i], err);
    }
    if (rc == STATUS_OK)
        rc = write_tokenizer(prefix, err);
    for (int i = 0; rc == STATUS_OK && i < 2; i++)
        rc = shard_writer_publish(out[i], err);
    shard_writer_close(out[0]);
    shard_writer_close(out[1]);
    grammar_close(g);
    return rc;
}

// ---- the best loss on rows ----

int corpus_row_loss(struct corpus_row_loss *out, const struct grammar *g, size_t T, size_t rows,
                    uint64_t seed, struct error *err)
{
    size_t max = grammar_entropy(g).tokens_max;
    char *text = malloc(max);
    uint16_t *tokens = malloc((T + 1 + max) * sizeof *tokens);
    if (!text || !tokens) {
        free(text);
        free(tokens);
        return error_set(err, STATUS_FAIL, "no memory for rows of %zu tokens", T);
    }
    uint64_t random = stream(seed, 2);
    double sum = 0, squares = 0;
    size_t have = 0;
    for (size_t row = 0; row < rows; row++) {
        while (have < T + 1) {
            size_t n = grammar_draw(g, &random, text, NULL);
            tokens[have++] = GRAMMAR_END;
            for (size_t i = 0; i < n; i++)
                tokens[have++] = (unsigned char)text[i];
        }
        double loss = (grammar_nats(g, tokens, T + 1) - grammar_nats(g, tokens, 1)) / (double)T;
        sum += loss;
        squares += loss * loss;
        have -= T;
        memmove(tokens, tokens + T, have * sizeof *tokens);
    }
    out->mean = sum / (double)rows;
    out->standard_error =
        sqrt(fmax(0, squares / (double)rows - out->mean * out->mean) / (double)rows);
    free(text);
    free(tokens);
    return STATUS_OK;
}
