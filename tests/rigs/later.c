// Calls that a program in Python leaves to atexit(3), where libraries in C++ destroy what lives then: Python has ended.
#include <stdio.h>
#include <stdlib.h>

static struct { int (*function)(void *); void *argument; } calls[4];
static int count;

static void make_calls(void)
{
    for (int i = 0; i < count; i++) printf("%d\n", calls[i].function(calls[i].argument));
    fflush(stdout);
}

void later(int (*function)(void *), void *argument)
{
    if (!count) atexit(make_calls);
    calls[count].function = function;
    calls[count++].argument = argument;
}
