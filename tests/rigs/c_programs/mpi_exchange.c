// Two ranks of MPI: messages both ways, a sum, a put into the window of the other. Prints what the NIC has received.

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int SIZES[] = {0, 8, 4096, 65536, 1 << 20};

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "rank %d, line %d: not %s\n", rank, __LINE__, #condition);       \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                    \
        }                                                                                    \
    } while (0)

static unsigned char byte_of(int rank, int nbytes, int at)
{
    return (unsigned char)(rank * 101 + nbytes * 7 + at * 13 + (at >> 8));
}

static void fill(unsigned char *memory, int rank, int nbytes)
{
    for (int i = 0; i < nbytes; i++) memory[i] = byte_of(rank, nbytes, i);
}

static long long counted(const char *name)
{
    char path[200];
    long long value = -1;
    snprintf(path, sizeof path, "/sys/class/infiniband/soft0/ports/1/counters/%s", name);
    FILE *file = fopen(path, "r");
    if (file == NULL || fscanf(file, "%lld", &value) != 1) value = -1;
    if (file != NULL) fclose(file);
    return value;
}

int main(int argc, char **argv)
{
    int rank, size, most = 1 << 20;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    CHECK(size == 2);
    unsigned char *ours = malloc(most), *theirs = malloc(most), *expected = malloc(most);
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        int nbytes = SIZES[i], got = -1;
        MPI_Status status;
        fill(ours, rank, nbytes);
        fill(expected, 1 - rank, nbytes);
        memset(theirs, 0, most);
        MPI_Sendrecv(ours, nbytes, MPI_BYTE, 1 - rank, 5, theirs, most, MPI_BYTE, 1 - rank, 5, MPI_COMM_WORLD, &status);
        MPI_Get_count(&status, MPI_BYTE, &got);
        CHECK(got == nbytes);
        CHECK(memcmp(theirs, expected, nbytes) == 0);
    }
    long mine = rank + 10, sum = 0;
    MPI_Allreduce(&mine, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    CHECK(sum == 21);

    MPI_Win window;
    memset(theirs, 0, most);
    fill(ours, rank, most);
    MPI_Win_create(theirs, most, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
    MPI_Win_fence(0, window);
    MPI_Put(ours, most, MPI_BYTE, 1 - rank, 0, most, MPI_BYTE, window);
    MPI_Win_fence(0, window);
    fill(expected, 1 - rank, most);
    CHECK(memcmp(theirs, expected, most) == 0);
    MPI_Win_free(&window);

    printf("rank %d of %d: done, the NIC has received %lld bytes\n", rank, size, 4 * counted("port_rcv_data"));
    fflush(stdout);
    MPI_Finalize();
    return 0;
}
