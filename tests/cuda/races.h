// Finds work whose order is left to chance, in the driver's form for it (`tests/cuda/build FOLDER races`): kernels are compiled
// so that they tell every access (watch.cpp), and libraries tell what their operands span. Of each word of memory it is known which work wrote it last, and
// which of each stream read it last; work that meets it must come after by streams, events and waits of the host alone,
// whatever order the streams happened to take.
#ifdef RACES
struct Races {
    enum { STREAMS = 10, WORD = 4 };
    struct Word {
        unsigned int written, read[STREAMS], by;
    };
    struct Memory {
        Address end;
        std::vector<Word> words;
    };
    std::map<Address, Memory> memories;
    // Of each stream, by its number.
    const Stream* known[STREAMS] = {};
    // The work that runs: its stream's number, which of its stream's works it is, and what comes before it.
    int number = -1;
    unsigned int turn = 0;
    const Clock* before = nullptr;
    std::string what;
    // Where the last access lay: in this memory, or between memories.
    Memory* last = nullptr;
    Address last_begin = 1, none_begin = 1, none_end = 0;

    int number_of(const Stream* stream) {
        for (int i = 0; i < STREAMS; i++)
            if (known[i] == stream) return i;
        for (int i = 0; i < STREAMS; i++)
            if (!known[i]) return known[i] = stream, i;
        stop("too many streams to watch");
        return 0;
    }

    void forget() {
        last = nullptr;
        last_begin = none_begin = 1;
        none_end = 0;
    }
    void allocated(Address at, size_t bytes) {
        memories[at] = Memory{at + bytes, std::vector<Word>((bytes + WORD - 1) / WORD, Word{})};
        forget();
    }
    void released(Address at) {
        memories.erase(at);
        forget();
    }

    void begin(const Stream* stream, size_t of, const Clock* clock) {
        number = number_of(stream);
        turn = (unsigned int)of;
        before = clock;
    }
    void end() { number = -1; }

    void ordered(int stream, size_t then, const char* how) {
        if (then == 0 || stream == number) return;
        auto found = before->find(known[stream]);
        if (found != before->end() && found->second >= then) return;
        stop(how);
    }

    void access(Address at, size_t bytes, bool writes) {
        if (number < 0 || bytes == 0 || (at >= none_begin && at < none_end)) return;
        if (!last || at < last_begin || at >= last->end) {
            auto next = memories.upper_bound(at);
            auto before_it = next == memories.begin() ? memories.end() : std::prev(next);
            if (before_it == memories.end() || at >= before_it->second.end) {
                none_begin = before_it == memories.end() ? 0 : before_it->second.end;
                none_end = next == memories.end() ? ~(Address)0 : next->first;
                return;
            }
            last_begin = before_it->first;
            last = &before_it->second;
        }
        size_t from = (at - last_begin) / WORD, to = (at + bytes - 1 - last_begin) / WORD;
        if (to >= last->words.size()) stop("an access beyond the end of an allocation");
        for (size_t i = from; i <= to; i++) {
            Word& word = last->words[i];
            if (writes ? word.written == turn && (int)word.by == number : word.read[number] == turn) continue;
            if (word.written) ordered((int)word.by, word.written, writes ? "race: two writes" : "race: a read beside a write");
            if (writes) {
                for (int s = 0; s < STREAMS; s++) ordered(s, word.read[s], "race: a write beside a read");
                word.written = turn;
                word.by = (unsigned int)number;
            } else {
                word.read[number] = turn;
            }
        }
    }
};
#else
struct Races {
    void allocated(Address, size_t) {}
    void released(Address) {}
    void begin(const Stream*, size_t, const Clock*) {}
    void end() {}
    void access(Address, size_t, bool) {}
};
#endif
static Races races;
